"""Tables in host memory that a device reads: their whole life against the rules of CANN's runtime."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engram.tables import DIM, expected, primes, write_tables

from vllm_ascend_dsv41.engram import (
    Acl,
    AclError,
    EngramOptionError,
    EngramOptions,
    EngramTables,
    Peers,
    Place,
    limits,
    memory,
    probe,
    storage,
)
from vllm_ascend_dsv41.engram.memory import PinnedMemory, PrivateMemory, SharedMemory
from vllm_ascend_dsv41.engram.registration import DeviceNotSetError, Registration
from vllm_ascend_dsv41.quant import CheckpointError, Weights

pytestmark = pytest.mark.long
ROWS = {1: 600_001, 4: 30_000}  # three blocks of 262,144 rows, one block
CODES = (107000, 107002, 207000, 207001, 507899, 507910, 507911)
OPTIONS = EngramOptions(chunk_mib=16, load_threads=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"), ROWS)


@pytest.fixture(params=["private", "shared", "kernel 5.10"])
def kind(request, monkeypatch):
    """Of host memory; on old kernels CANN allocates it."""
    if request.param == "kernel 5.10":
        monkeypatch.setenv("FAKE_CANN_OLD_KERNEL", "1")
        monkeypatch.setattr(limits, "maps_anonymous_memory", lambda: False)
    return request.param


def layers():
    return [(layer, primes(rows)) for layer, rows in ROWS.items()]


def tables(checkpoint, acl, kind="private"):
    sharing = Peers() if kind == "shared" else None
    place = Place(torch.device("cpu"), sharing=sharing, runtime=lambda: acl)
    return EngramTables(checkpoint, layers(), DIM, replace(OPTIONS, dp_shared_memory=kind == "shared"), place)


def look_up_everywhere(checkpoint, made):
    for number, (layer, rows) in enumerate(ROWS.items()):
        ids = torch.cat([torch.arange(-2, 3), torch.arange(262_140, 262_150), torch.randint(-5, rows + 5, (500,))])
        ids = torch.cat([ids, torch.arange(rows - 3, rows + 3)])[:, None]
        wanted = expected(checkpoint, layer, ids, torch.float32)
        assert torch.equal(made[number].lookup(ids, torch.float32), wanted)
        assert made[number].lookup(ids, torch.bfloat16).dtype is torch.bfloat16


def test_a_whole_life(checkpoint, fake, acl, kind):
    registered = fake.calls("aclrtHostRegisterV2")
    made = tables(checkpoint, acl, kind)
    assert fake.calls("aclrtHostRegisterV2") - registered == 2 + 3 + 3 + 1 + 1  # the probe; a block per part and chunk
    assert not made[0].lookup(torch.arange(5)[:, None], torch.float32).any()  # zero until loaded
    keys = made.load()
    assert keys == set(checkpoint.files)
    look_up_everywhere(checkpoint, made)
    assert all("registered host memory" in line for line in made.report())
    made.close()
    made.close()


def test_bf16_tables(tmp_path, fake, acl, monkeypatch):
    checkpoint = write_tables(tmp_path, {1: 5000}, Weights.BF16)
    monkeypatch.setattr(storage, "engram_lookup_mapped", lambda *arguments: arguments)
    place = Place(torch.device("cpu"), runtime=lambda: acl)
    monkeypatch.setattr("vllm_ascend_dsv41.engram.tables.probe", lambda *_: None)
    made = EngramTables(checkpoint, [(1, primes(5000))], DIM, OPTIONS, place)
    made.load()
    addresses, _, rows, _, dim, groups, _ = made[0].lookup(torch.zeros(1, 1, dtype=torch.int64), torch.bfloat16)
    assert (rows, dim, groups) == (5000, DIM, 0)
    assert addresses[:, 1].tolist() == [0]
    made.close()


def test_blocks_are_unregistered_last_first_before_their_memory_goes(checkpoint, fake, acl, monkeypatch):
    done = []
    for name in ("register", "unregister", "synchronize"):
        real = getattr(acl, name)
        monkeypatch.setattr(acl, name, lambda *a, real=real, name=name: (done.append((name, *a[:1])), real(*a)))
    close = PrivateMemory.close
    monkeypatch.setattr(PrivateMemory, "close", lambda self: (done.append(("free",)), close(self)))
    made = tables(checkpoint, acl)
    done.clear()
    registered = [
        address for layer in made._layers for part in layer.table.memory.values() for address in part.addresses
    ]
    made.close()
    assert [step[0] for step in done if step[0] != "synchronize"] == ["unregister"] * 2 + ["free"] * 2 + [
        "unregister"
    ] * 6 + ["free"] * 2
    assert [step[1] for step in done if step[0] == "unregister"] == registered[::-1]
    assert done[0][0] == "synchronize"


FUNCTIONS = [
    "aclrtGetDevice",
    "aclrtSynchronizeDevice",
    "aclrtMallocHost",
    "aclrtFreeHost",
    "aclrtHostRegisterV2",
    "aclrtHostGetDevicePointer",
    "aclrtHostUnregister",
]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("code", CODES)
def test_no_failure_leaves_anything_behind(checkpoint, fake, acl, kind, function, code):
    """Each call of each function fails once, from making the tables to closing them."""
    raised, call = [], 1
    while True:
        first = fake.calls(function)
        fake.inject(function, code, call)
        try:
            tables(checkpoint, acl, kind).close()
        except AclError as error:
            raised.append((error.function, error.code))
        fake.library.fakecann_clear_injections()
        assert fake.left == (0, 0, 0), (function, code, call)
        if fake.calls(function) - first < call:
            break
        call += 1
    assert set(raised) <= {(function, code)}
    if function in ("aclrtHostRegisterV2", "aclrtHostGetDevicePointer"):
        assert len(raised) == call - 1 == 10


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_memory_that_cannot_be_unregistered_stays(checkpoint, fake, acl, kind, monkeypatch):
    """A driver that refuses a block and then everything: the first error is raised, and no registered memory goes."""
    refused = [2 + 3]  # the probe passes

    def register(*arguments):
        refused[0] -= 1
        if refused[0] < 0:
            monkeypatch.setattr(acl, "unregister", fail)
            raise AclError("aclrtHostRegisterV2", 207001, "")
        return real(*arguments)

    def fail(address):
        raise AclError("aclrtHostUnregister", 507899, "")

    real = acl.register
    monkeypatch.setattr(acl, "register", register)
    with pytest.raises(AclError, match="aclrtHostRegisterV2 returned 207001"):
        tables(checkpoint, acl, kind)
    assert fake.left == (3, 0, 2)  # its weights are registered; they and the scales are mapped
    monkeypatch.undo()
    acl.unregister = type(acl).unregister.__get__(acl)
    [held] = memory._not_given_back
    held.close()
    memory._not_given_back.clear()


def test_the_device_must_be_set_first(checkpoint, fake, acl):
    errors = []

    def without_device():
        try:
            tables(checkpoint, acl)
        except AclError as error:
            errors.append(error)

    thread = threading.Thread(target=without_device)
    thread.start()
    thread.join()
    assert errors[0].code == 107002
    assert "torch.npu.set_device" in str(errors[0])


def test_what_another_owner_has_registered_is_refused(fake, acl):
    block = PrivateMemory(8 << 20, 4 << 20)
    acl.register(block.addresses[1], 4096, pinned=False)
    registration = Registration(acl, block, 0)
    with pytest.raises(AclError, match="registered already"):
        registration.open()
    registration.close()
    assert registration.addresses == []
    acl.unregister(block.addresses[1])
    registration.open()
    assert len(registration.addresses) == 2
    registration.close()
    block.close()


def test_memory_is_not_registered_for_another_device(fake, acl):
    block = PrivateMemory(4096, 2 << 20)
    with pytest.raises(DeviceNotSetError, match=r"for device 3 would be registered for device 0.*set_device\(3\)"):
        Registration(acl, block, 3).open()
    block.close()


def test_flags_follow_where_the_memory_came_from(fake, acl, monkeypatch):
    flags = []
    real = acl._call
    monkeypatch.setattr(
        acl, "_call", lambda name, *a: (flags.append(a[2]) if name.endswith("V2") else None, real(name, *a))
    )
    for block in (PrivateMemory(1, 2 << 20), SharedMemory(1, 2 << 20), PinnedMemory(1, 2 << 20, acl)):
        registration = Registration(acl, block, 0)
        registration.open()
        registration.close()
        block.close()
    assert flags == [0x10000002, 0x10000002, 0x2]


def test_an_address_inside_a_page_is_refused_here(acl):
    with pytest.raises(ValueError, match="page of 4096 bytes"):
        acl.register(4096 + 64, 4096, pinned=False)


def test_closing_goes_on_where_it_failed(checkpoint, fake, acl):
    made = tables(checkpoint, acl)
    table = made[0]
    fake.inject("aclrtHostUnregister", 507899, 3)
    fake.inject("aclrtHostUnregister", 507899, 4)  # it is tried twice
    with pytest.raises(AclError, match="507899"):
        table.close()
    assert fake.left[0] == 2 + 4  # of the other table, and of this one all but two
    with pytest.raises(RuntimeError, match="not open"):
        table.lookup(torch.zeros(1, 1, dtype=torch.int64), torch.float32)
    made.close()


def test_a_device_that_reads_something_else_is_found_out(checkpoint, fake, acl, monkeypatch):
    def wrong(*arguments):
        out = fake.look_up(*arguments)
        out[77] += 1  # of the probe: an id outside, the last row, an id outside, then each sixteenth row
        return out

    monkeypatch.setattr(storage, "engram_lookup_mapped", wrong)
    with pytest.raises(probe.HostReadError, match=r"1 of 515 rows differ, the first is row 1184\..*cpu_offload"):
        tables(checkpoint, acl)


def test_the_device_address_is_not_the_hosts(fake, acl):
    """A program that follows it on the host dies."""
    program = f"""
import ctypes
from vllm_ascend_dsv41.engram import Acl
from vllm_ascend_dsv41.engram.memory import PrivateMemory
ctypes.CDLL({str(fake.path)!r}).aclrtSetDevice(0)
acl, memory = Acl({str(fake.path)!r}), PrivateMemory(4096, 2 << 20)
acl.register(memory.addresses[0], 2 << 20, False)
address = acl.device_address(memory.addresses[0])
print("registered", flush=True)
ctypes.string_at(address, 1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("registered\n")
    assert done.returncode == -11


def test_files_and_read_only_memory_are_refused_by_the_driver(fake, acl, tmp_path):
    file = np.memmap(tmp_path / "file", dtype=np.uint8, mode="w+", shape=4096)
    with pytest.raises(AclError, match="does not map files"):
        acl.register(file.ctypes.data, 4096, pinned=False)
    block = PrivateMemory(4096, 2 << 20)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(block.addresses[0]), 4096, 1)
    with pytest.raises(AclError, match="read-only"):
        acl.register(block.addresses[0], 4096, pinned=False)
    block.close()


def test_tables_that_cannot_be_loaded_are_given_back(tmp_path, fake, acl, kind):
    """The same process may try again, with other files."""
    files = write_tables(tmp_path, ROWS)
    path = tmp_path / files.files["layers.4.engram.embed.scale"]
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    made = tables(files, acl, kind)
    with pytest.raises(CheckpointError, match="header promises"):
        made.load()
    assert fake.left == (0, 0, 0)
    path.write_bytes(content)
    made = tables(files, acl, kind)
    made.load()
    made.close()


@pytest.mark.parametrize("option", ["dp_shared_memory", "use_thp"])
def test_what_old_kernels_cannot_do_is_refused(checkpoint, acl, monkeypatch, option):
    monkeypatch.setattr(limits, "maps_anonymous_memory", lambda: False)
    place = Place(torch.device("cpu"), sharing=Peers(), runtime=lambda: acl)
    with pytest.raises(EngramOptionError, match=rf"{option} needs a Linux kernel after 5\.10"):
        EngramTables(checkpoint, layers(), DIM, EngramOptions(**{option: True}), place)


def test_tables_that_were_forgotten_are_closed_when_the_process_ends(checkpoint, overlay, tmp_path):
    """An exception between making and serving: no close, but the interpreter's end."""
    program = f"""
import ctypes, pickle, sys, torch
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from contract.conftest import Fake
from vllm_ascend_dsv41.engram import Acl, EngramOptions, EngramTables, Place, storage
from engram.tables import DIM, primes
fake = Fake(Path({str(overlay / "lib" / "libascendcl.so")!r}))
fake.library.aclGetRecentErrMsg.restype = ctypes.c_void_p
fake.library.aclrtSetDevice(0)
storage.engram_lookup_mapped = fake.look_up
checkpoint = pickle.loads(Path({str(tmp_path / "checkpoint")!r}).read_bytes())
import atexit
atexit.register(lambda: print("left", fake.library.fakecann_live_segments(1), flush=True))  # runs after ours
import vllm_ascend_dsv41.engram.tables as module
atexit.unregister(module._close_registered); atexit.register(module._close_registered)
place = Place(torch.device("cpu"), runtime=lambda: Acl(fake.path))
tables = EngramTables(checkpoint, [(4, primes(30_000))], DIM, EngramOptions(), place)
print("made", fake.library.fakecann_live_segments(1), flush=True)
raise SystemExit(3)
"""
    (tmp_path / "checkpoint").write_bytes(pickle.dumps(checkpoint))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("made 2\nleft 0\n", 3), done.stderr


def test_versions(fake, acl, monkeypatch):
    monkeypatch.setenv("FAKE_CANN_VERSION", "9.2.0.B100")
    assert acl.version() == "9.2.0.B100"
    fake.inject("aclsysGetVersionStr", 107000, 1)
    assert acl.version() == "unknown"


def test_no_runtime():
    with pytest.raises(RuntimeError, match=r"nowhere.so cannot be loaded.*set_env"):
        Acl("/nowhere.so")
    with pytest.raises(RuntimeError, match=r"CANN 8\.5 or newer"):
        Acl("libc.so.6")
