"""The fake CANN runtime by ctypes, without torch_npu: what it is strict about is in tests/emulated_npu/README.md."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from ctypes import c_char_p, c_int32, c_uint64
from pathlib import Path

import pytest
import torch
from emulated_npu import environment
from torch import Tensor

from vllm_ascend_dsv41 import native
from vllm_ascend_dsv41.engram import Acl, memory, storage
from vllm_ascend_dsv41.engram.memory import MappedMemory

REGISTERED = 1  # SegmentKind of cann.h


@pytest.fixture(scope="session")
def overlay() -> Path:
    """Where the fake CANN and the torch_npu wheel with its headers lie."""
    try:
        return environment.prepare()
    except environment.SetupError as error:
        if os.environ.get("EMULATED_NPU_REQUIRED"):
            raise
        pytest.skip(str(error))


class Fake:
    """The runtime's own view of this process."""

    def __init__(self, path: Path) -> None:
        self.path, self.mappings = path, []
        self.library = ctypes.CDLL(str(path))
        self.library.fakecann_inject.argtypes = [c_char_p, c_uint64, c_int32]
        for name in ("fakecann_calls", "fakecann_live_segments", "fakecann_host_blocks"):
            getattr(self.library, name).restype = c_uint64
        self.library.fakecann_translate.restype = ctypes.c_int64
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.library.fakecann_translate.argtypes = [pointer, pointer, size, size, c_int32]

    def inject(self, name: str, code: int, call: int) -> None:
        self.library.fakecann_inject(name.encode(), call, code)

    def calls(self, name: str) -> int:
        return int(self.library.fakecann_calls(name.encode()))

    @property
    def left(self) -> tuple[int, int, int]:
        """Registrations, blocks of aclrtMallocHost, mappings for tables."""
        return (
            int(self.library.fakecann_live_segments(REGISTERED)),
            int(self.library.fakecann_host_blocks()),
            sum(mapping._map is not None for mapping in self.mappings),
        )

    def look_up(
        self, addresses: Tensor, ids: Tensor, rows: int, chunk_rows: int, dim: int, groups: int, dtype: torch.dtype
    ) -> Tensor:
        """``engram_lookup_mapped`` as a kernel of device 0 does it: every address is the device's."""
        device, host = addresses.numpy().astype("uint64").flatten(), torch.zeros(addresses.numel(), dtype=torch.int64)
        used = device if groups else device[::2].copy()
        target = host if groups else host[: len(used)]
        bad = self.library.fakecann_translate(used.ctypes.data, target.data_ptr(), len(used), 1, 0)
        if bad >= 0:
            raise RuntimeError(ctypes.string_at(self.library.aclGetRecentErrMsg()).decode())
        chunks = host.view(-1, 2).numpy()
        out = torch.empty(ids.numel(), dim)
        native.engram_rows(chunks, ids.flatten().contiguous().numpy(), rows, chunk_rows, groups, out.numpy())
        return out.view(*ids.shape, dim).to(dtype)


@pytest.fixture
def fake(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """The runtime with device 0 set, strict about the flag for pinned memory; leaves nothing behind."""
    monkeypatch.setenv("FAKE_CANN_STRICT_PINNED", "1")
    fake = Fake(overlay / "lib" / "libascendcl.so")
    fake.library.aclGetRecentErrMsg.restype = ctypes.c_void_p
    assert fake.library.aclrtSetDevice(0) == 0
    monkeypatch.setattr(storage, "engram_lookup_mapped", fake.look_up)
    make = MappedMemory.__init__
    monkeypatch.setattr(MappedMemory, "__init__", lambda self, *a: (fake.mappings.append(self), make(self, *a))[1])
    yield fake
    fake.library.fakecann_clear_injections()
    assert fake.left == (0, 0, 0)
    assert memory._not_given_back == []


@pytest.fixture
def acl(fake: Fake) -> Acl:
    return Acl(fake.path)
