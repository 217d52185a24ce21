"""Making host memory readable for the device of this process."""

from __future__ import annotations

from .acl import Acl
from .memory import HostMemory


class Registration:
    """Blocks of host memory as the device sees them. The thread must have set its device: without, CANN registers for
    device 0."""

    def __init__(self, acl: Acl, memory: HostMemory) -> None:
        self._acl, self._memory = acl, memory
        self._registered: list[int] = []
        self.addresses: list[int] = []
        """The device's address of each block, once opened."""

    def open(self) -> None:
        """Register every block. When one is refused (AclError), those before it are taken back, last first."""
        self.device = self._acl.device()
        try:
            for block in self._memory.blocks:
                address = block.ctypes.data
                self._acl.register(address, block.nbytes, self._memory.pinned)
                self._registered.append(address)
                self.addresses.append(self._acl.device_address(address))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for the device, then unregister, last first. May be called again: after an AclError it goes on with what
        is left."""
        if self._registered:
            self._acl.synchronize()
        while self._registered:
            self._acl.unregister(self._registered[-1])
            self._registered.pop()
        self.addresses = []
