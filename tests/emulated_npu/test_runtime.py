"""The fake CANN: memory, registration, streams, injected errors."""

import ctypes

import pytest

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu]

ALREADY_REGISTERED, NOT_REGISTERED, NO_CONTEXT, INVALID, UNSUPPORTED, DRIVER, FREE = (
    507910,
    507911,
    107002,
    107000,
    207000,
    507899,
    207002,
)
MAPPED, PINNED, READONLY = 0x2, 0x10000000, 0x8


@pytest.fixture
def acl():
    """libascendcl.so by ctypes, as storage code uses it, with a device set."""
    import torch

    torch.npu.set_device(0)
    library = ctypes.CDLL("libascendcl.so")
    library.aclrtHostRegisterV2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32]
    for name in ("aclrtFreeHost", "aclrtHostUnregister", "aclrtFree"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    library.aclrtMallocHost.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.aclrtHostGetDevicePointer.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
    return library


@pytest.fixture
def pinned(acl):
    pointer = ctypes.c_void_p()
    assert acl.aclrtMallocHost(ctypes.byref(pointer), 1 << 16) == 0
    yield pointer.value
    acl.aclrtHostUnregister(pointer)
    assert acl.aclrtFreeHost(pointer) == 0


def device_pointer(acl, host):
    out = ctypes.c_void_p()
    return acl.aclrtHostGetDevicePointer(host, ctypes.byref(out), 0), out.value


def test_memory_shrinks_and_grows():
    import torch

    x = torch.empty(100 << 20, dtype=torch.uint8, device="npu")
    torch.npu.empty_cache()
    before, total = torch.npu.mem_get_info()
    assert 0 < before < total
    del x
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] >= before + (100 << 20)


def test_out_of_memory_is_an_error():
    import torch

    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(100 << 30, dtype=torch.uint8, device="npu")


def test_device_addresses_are_not_host_addresses():
    import torch

    from emulated_npu import library, memory

    x = torch.arange(8, device="npu")
    assert memory.host(x).data_ptr() != x.data_ptr()
    with pytest.raises(library.EmulationError, match="not a device address"):
        memory.segment_of(torch.arange(8).data_ptr())


def test_the_host_cannot_follow_a_device_pointer():
    """Such a program dies, as on a host whose device memory is not mapped: in a child, to see it."""
    import subprocess
    import sys

    code = "import torch, ctypes; x = torch.ones(4, device='npu'); ctypes.c_float.from_address(x.data_ptr()).value"
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True)
    assert done.returncode == -11
    assert "Segmentation fault" in done.stderr


def test_fresh_memory_is_poisoned():
    import torch

    torch.zeros(1 << 20, device="npu")  # its block goes back to the allocator
    assert torch.isnan(torch.empty(1 << 20, device="npu")).all()
    assert torch.isnan(torch.empty_strided((4, 4), (1, 4), dtype=torch.bfloat16, device="npu")).all()


def test_use_after_free():
    import torch

    from emulated_npu import library, memory

    x = torch.ones(64 << 20, dtype=torch.uint8, device="npu")
    address = x.data_ptr()
    assert int(memory.view(address, torch.uint8, (1,), (1,))) == 1
    del x
    torch.npu.empty_cache()
    with pytest.raises(library.EmulationError, match="use after free"):
        memory.segment_of(address)


def test_out_of_bounds():
    import torch

    from emulated_npu import library

    x = torch.ones(64 << 20, dtype=torch.uint8, device="npu")
    library.LIBRARY.aclrtMemset.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_size_t]
    assert library.LIBRARY.aclrtMemset(x.data_ptr() + (60 << 20), 8 << 20, 0, 8 << 20) == INVALID
    assert "out of bounds" in library.recent_error()


def test_registration(acl, pinned):
    from emulated_npu import library

    assert acl.aclrtHostRegisterV2(pinned, 1 << 16, MAPPED) == 0
    error, address = device_pointer(acl, pinned + 4096)
    assert error == 0
    assert address != pinned + 4096
    assert acl.aclrtHostRegisterV2(pinned + 8192, 4096, MAPPED) == ALREADY_REGISTERED
    assert acl.aclrtFreeHost(pinned) == FREE, "unregister before freeing"
    assert library.LIBRARY.aclrtMemcpy(ctypes.c_void_p(address), 8, ctypes.c_void_p(pinned), 8, 1) == INVALID, (
        "for kernels only"
    )
    assert acl.aclrtHostUnregister(pinned) == 0
    assert acl.aclrtHostUnregister(pinned) == NOT_REGISTERED
    assert device_pointer(acl, pinned)[0] == INVALID
    assert library.LIBRARY.fakecann_live_segments(1) == 0


def test_registration_refusals(acl, pinned):
    for pointer, size, flag, code in [
        (None, 4096, MAPPED, INVALID),
        (pinned, 0, MAPPED, INVALID),
        (pinned + 8, 4096, MAPPED, INVALID),
        (pinned, 4096, 0, INVALID),
        (pinned, 4096, 0x100, INVALID),
        (pinned, 4096, READONLY, UNSUPPORTED),
    ]:
        assert acl.aclrtHostRegisterV2(pointer, size, flag) == code, (pointer, size, flag)


def test_registration_before_set_device():
    """Without any device: refused. With torch_npu's default device: bound to device 0, and another device
    cannot use it.
    """
    import subprocess
    import sys

    code = (
        "import ctypes; l = ctypes.CDLL('libascendcl.so'); p = ctypes.c_void_p(); "
        "l.aclrtMallocHost(ctypes.byref(p), 4096); "
        "l.aclrtHostRegisterV2.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32]; "
        "print(l.aclrtHostRegisterV2(p, 4096, 2))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str(NO_CONTEXT)


@pytest.mark.emulated_npu(devices=2)
def test_registration_before_set_device_binds_to_the_default_device(acl, pinned):
    """torch_npu's acl_default.json names device 0 (it is used from CANN 8.3 on): what registers before set_device(1) is
    not for device 1."""
    import threading
    from pathlib import Path

    import numpy as np
    import torch
    import torch_npu

    from emulated_npu import library, memory

    assert acl.aclInit(str(Path(torch_npu.__file__).with_name("acl_default.json")).encode()) == 0
    codes = []
    early = threading.Thread(target=lambda: codes.append(acl.aclrtHostRegisterV2(pinned, 1 << 16, MAPPED)))
    early.start()  # a thread that never set a device
    early.join()
    assert codes == [0]
    torch.npu.set_device(1)
    _, address = device_pointer(acl, pinned)
    with pytest.raises(library.EmulationError, match=r"device 1 used memory of device 0 \(registered before"):
        memory.translate(np.array([address], dtype=np.uint64), 4, 1)


def test_unregister_needs_a_synchronise(acl, pinned):
    import numpy as np
    import torch

    from emulated_npu import memory

    assert acl.aclrtHostRegisterV2(pinned, 1 << 16, MAPPED) == 0
    _, address = device_pointer(acl, pinned)
    memory.translate(np.array([address], dtype=np.uint64), 4, 0)  # as a kernel does
    assert acl.aclrtHostUnregister(pinned) == DRIVER
    torch.npu.synchronize()
    assert acl.aclrtHostUnregister(pinned) == 0


def test_every_kernel_obeys_registration(acl, pinned):
    """Not only Triton's: a tensor over the device address, used by PyTorch's own operators."""
    import torch
    import torch_npu

    assert acl.aclrtHostRegisterV2(pinned, 1 << 16, MAPPED) == 0
    _, address = device_pointer(acl, pinned)
    storage = torch_npu._C._construct_storage_from_data_pointer(address, torch.device("npu:0"), 16)
    x = torch.empty(0, dtype=torch.float32, device="npu:0").set_(storage, 0, (4,), (1,))
    x.fill_(3)
    assert (ctypes.c_float * 4).from_address(pinned)[:] == [3.0] * 4
    assert acl.aclrtHostUnregister(pinned) == DRIVER
    torch.npu.synchronize()
    assert acl.aclrtHostUnregister(pinned) == 0


def test_registration_needs_memory(acl, pinned):
    import torch

    x = torch.ones(1 << 20, device="npu")
    assert acl.aclrtHostRegisterV2(0x10000000, 4096, MAPPED) == DRIVER
    assert acl.aclrtHostRegisterV2(x.untyped_storage().data_ptr() & ~4095, 4096, MAPPED) == DRIVER


def test_injected_errors(acl, pinned):
    from emulated_npu import library

    library.inject("aclrtHostRegisterV2", 207001, call=2)
    assert acl.aclrtHostRegisterV2(pinned, 4096, MAPPED) == 0
    assert acl.aclrtHostRegisterV2(pinned + 4096, 4096, MAPPED) == 207001
    assert acl.aclrtHostRegisterV2(pinned + 4096, 4096, MAPPED) == 0
    library.clear_injections()
    assert acl.aclrtHostUnregister(pinned + 4096) == 0


def test_unlisted_functions_are_loud():
    import subprocess
    import sys

    code = "import torch, torch_npu, ctypes; ctypes.CDLL('libge_runner.so').aclrtMallocPhysical()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -6
    assert "aclrtMallocPhysical was called, which the emulated NPU does not list" in done.stderr


def test_unlisted_operators_are_loud():
    import torch
    import torch_npu

    with pytest.raises(RuntimeError, match=r"aclnnFastGelu has no reference.*f32\[4\]"):
        torch_npu.npu_fast_gelu(torch.ones(4, device="npu"))


def test_device_per_thread():
    import threading

    import torch

    torch.npu.set_device(0)
    seen = []
    thread = threading.Thread(target=lambda: seen.append((torch.ones(3, device="npu") + 1).tolist()))
    thread.start()
    thread.join()
    assert seen == [[2.0, 2.0, 2.0]]


def test_events_and_streams():
    import torch

    side = torch.npu.Stream()
    first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    with torch.npu.stream(side):
        first.record()
        x = torch.ones(3, device="npu") * 2
        last.record()
    torch.npu.current_stream().wait_stream(side)
    last.synchronize()
    assert first.elapsed_time(last) >= 0
    assert x.tolist() == [2.0] * 3
