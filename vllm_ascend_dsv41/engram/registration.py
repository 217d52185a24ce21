"""Making host memory readable for the device of this process."""

from __future__ import annotations

from .acl import Acl
from .memory import HostMemory


class DeviceNotSetError(RuntimeError):
    """The thread has set another device than the one that shall read the memory."""


class Registration:
    """Blocks of host memory as ``device`` sees them. Whoever opens it closes it, also when opening failed half way."""

    def __init__(self, acl: Acl, memory: HostMemory, device: int) -> None:
        self._acl, self._memory, self._device = acl, memory, device
        self._registered: list[int] = []
        self.addresses: list[int] = []
        """The device's address of each block, once opened."""

    def open(self) -> None:
        """Register every block. Raises AclError, and DeviceNotSetError: CANN would register for the device that the
        thread has set, which is device 0 where it has set none."""
        current = self._acl.device()
        if current != self._device:
            raise DeviceNotSetError(
                f"host memory for device {self._device} would be registered for device {current}: "
                f"torch.npu.set_device({self._device}) must come first, in this thread"
            )
        for block in self._memory.blocks:
            address = block.ctypes.data
            self._acl.register(address, block.nbytes, self._memory.pinned)
            self._registered.append(address)
            self.addresses.append(self._acl.device_address(address))

    def close(self) -> None:
        """Wait for the device, then unregister, last first. May be called again: after an AclError it goes on with what
        is left."""
        if self._registered:
            self._acl.synchronize()
        while self._registered:
            self._acl.unregister(self._registered[-1])
            self._registered.pop()
        self.addresses = []
