"""The functions of CANN's runtime that Engram tables need, by ctypes: torch_npu wraps only some of them.

Signatures are those of ``acl/acl_rt.h`` in the torch_npu wheel; tests/contract compiles them against it.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

LIBRARY = "libascendcl.so"
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "aclrtGetDevice": (POINTER(c_int32),),
    "aclrtSynchronizeDevice": (),
    "aclrtMallocHost": (POINTER(c_void_p), c_size_t),
    "aclrtFreeHost": (c_void_p,),
    "aclrtHostRegisterV2": (c_void_p, c_uint64, c_uint32),
    "aclrtHostGetDevicePointer": (c_void_p, POINTER(c_void_p), c_uint32),
    "aclrtHostUnregister": (c_void_p,),
}
VERSION = "aclsysGetVersionStr", (c_char_p, c_char_p)  # told to the operator where the runtime has it
MAPPED, PINNED = 0x2, 0x10000000  # ACL_HOST_REG_MAPPED; ACL_HOST_REG_PINNED, for memory that is not pinned yet
PAGE = 4096
VERSION_SIZE = 128  # ACL_PKG_VERSION_MAX_SIZE

#: What an error code of the runtime means for host memory, and what helps (api_ref 11-02 of the CANN runtime; the
#: last sentences are what operators of other packages met).
MEANING = {
    107000: "a parameter is invalid; an A5 device refuses the flag for unpinned memory so",
    107002: "the process has no device yet: torch.npu.set_device(rank) must come first",
    107017: "the memory is mapped read-only",
    207000: "this device or driver does not support it",
    207001: "the driver could not allocate; lower chunk_mib, or look at the limits of locked memory (ulimit -l)",
    507899: "the driver failed; it does not map files, and its page tables hold 20 to 32 GB a device before HDK 25.5",
    507910: "part of the range is registered already: is another process part of this one?",
    507911: "the range is not registered",
}


class AclError(RuntimeError):
    """A call of CANN's runtime failed; ``code`` is what it returned."""

    def __init__(self, function: str, code: int, detail: str) -> None:
        self.function, self.code = function, code
        meaning = MEANING.get(code, "see the list of error codes of the CANN runtime")
        super().__init__(f"{function} returned {code}: {meaning}" + (f" ({detail})" if detail else ""))


class AclMissingError(RuntimeError):
    """The runtime cannot be loaded, or lacks a function."""


class Acl:
    """CANN's runtime in this process. Every method raises AclError when the runtime refuses."""

    def __init__(self, library: str | os.PathLike[str] = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(os.fspath(library))
        except OSError as error:
            raise AclMissingError(f"{library} cannot be loaded: {error}; source CANN's set_env.sh first") from error
        for name, arguments in SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise AclMissingError(f"{library} has no {name}; registering host memory needs CANN 8.5 or newer")
            function.argtypes, function.restype = arguments, c_int32
        self._library.aclGetRecentErrMsg.restype = c_char_p
        if hasattr(self._library, VERSION[0]):
            getattr(self._library, VERSION[0]).argtypes = VERSION[1]

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            detail = self._library.aclGetRecentErrMsg() or b""
            raise AclError(name, code, detail.decode(errors="replace").strip())

    def _call_twice(self, name: str, *arguments: Any) -> None:
        """For giving things back: what a passing failure keeps would be lost until the process ends."""
        try:
            self._call(name, *arguments)
        except AclError:
            self._call(name, *arguments)

    def version(self) -> str:
        """Of CANN's runtime package, as ``9.2.0``; ``unknown`` where it does not say."""
        text = ctypes.create_string_buffer(VERSION_SIZE)
        try:
            self._call(VERSION[0], b"runtime", text)
        except (AclError, AttributeError):
            return "unknown"
        return text.value.decode(errors="replace")

    def device(self) -> int:
        """The device that this thread has set."""
        device = c_int32(-1)
        self._call("aclrtGetDevice", ctypes.byref(device))
        return device.value

    def synchronize(self) -> None:
        """Wait for everything that was given to the device."""
        self._call_twice("aclrtSynchronizeDevice")

    def allocate(self, size: int) -> int:
        """Address of ``size`` bytes of pinned host memory."""
        pointer = c_void_p()
        self._call("aclrtMallocHost", ctypes.byref(pointer), size)
        return int(pointer.value or 0)

    def free(self, address: int) -> None:
        """Give back what ``allocate`` returned."""
        self._call_twice("aclrtFreeHost", address)

    def register(self, address: int, size: int, pinned: bool) -> None:
        """Let the device of this thread read [address, address + size); ``pinned``: the memory is from ``allocate``."""
        if address % PAGE:
            raise ValueError(f"registering host memory at {address:#x}: it must begin on a page of {PAGE} bytes")
        self._call("aclrtHostRegisterV2", address, size, MAPPED if pinned else MAPPED | PINNED)

    def device_address(self, address: int) -> int:
        """Where the device sees registered memory: for kernels only, not for copies."""
        pointer = c_void_p()
        self._call("aclrtHostGetDevicePointer", address, ctypes.byref(pointer), 0)
        return int(pointer.value or 0)

    def unregister(self, address: int) -> None:
        """Take the registration back. The device must be synchronised, and the memory still there."""
        self._call_twice("aclrtHostUnregister", address)
