"""Engram tables on the device: its memory, and host memory that it reads; look-ups, streams, graphs."""

import pytest
import torch
from engram.tables import DIM, expected, primes, write_tables

from vllm_ascend_dsv41 import ops
from vllm_ascend_dsv41.engram import Acl, AclError, EngramOptions, EngramTables, Place, Prefetcher
from vllm_ascend_dsv41.engram.registration import DeviceNotSetError
from vllm_ascend_dsv41.ops import engram as reference_ops

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu]
ROWS = {1: 600_001, 4: 3000}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("tables"), ROWS)


def tables(checkpoint, **options):
    torch.npu.set_device(0)
    place = Place(torch.device("npu", 0), runtime=Acl)
    layers = [(layer, primes(rows)) for layer, rows in ROWS.items()]
    made = EngramTables(checkpoint, layers, DIM, EngramOptions(chunk_mib=16, **options), place)
    made.load()
    return made


def test_made_as_vllm_makes_models(checkpoint):
    """New tensors are the device's there, unless they say otherwise."""
    with torch.device("npu"):
        made = tables(checkpoint)
    ids = some_rows(ROWS[4])
    assert torch.equal(made[1].lookup(ids.to("npu"), torch.float32).cpu(), expected(checkpoint, 4, ids, torch.float32))
    made.close()


@pytest.mark.emulated_npu(devices=2)
def test_memory_is_not_registered_for_another_device(checkpoint):
    """Without set_device CANN would take device 0."""
    torch.npu.set_device(0)
    place = Place(torch.device("npu", 1), runtime=Acl)
    with pytest.raises(DeviceNotSetError, match=r"for device 1 would be registered for device 0.*set_device\(1\)"):
        EngramTables(checkpoint, [(4, primes(ROWS[4]))], DIM, EngramOptions(), place)


def some_rows(count):
    return torch.cat([torch.arange(-2, 2), torch.randint(0, count, (20,)), torch.arange(count - 2, count + 2)])[:, None]


@pytest.mark.parametrize("cpu_offload", [True, False], ids=["registered host memory", "device memory"])
def test_rows_are_those_of_the_file(checkpoint, cpu_offload):
    made = tables(checkpoint, cpu_offload=cpu_offload)
    for number, (layer, rows) in enumerate(ROWS.items()):
        for dtype in (torch.float32, torch.bfloat16):
            ids = some_rows(rows)
            if number == 0:  # in each of the three blocks that are registered
                ids = torch.cat([ids, torch.tensor([[262_143], [262_144], [524_288]])])
            found = made[number].lookup(ids.to("npu"), dtype)
            assert found.device.type == "npu"
            assert torch.equal(found.cpu(), expected(checkpoint, layer, ids, dtype))
    assert ("registered host memory" if cpu_offload else "device memory") in made.report()[0]
    made.close()
    with pytest.raises((RuntimeError, AssertionError)):
        made[0].lookup(torch.zeros(1, 1, dtype=torch.int64, device="npu"), torch.float32)


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("groups", [8, 2, 0])
def test_the_operator_is_its_reference(tokens, groups):
    codes = torch.randint(-127, 128, (50, 256), dtype=torch.int8) if groups else torch.randn(50, 256).bfloat16()
    scale = torch.rand(50, groups) if groups else None
    ids = torch.randint(-3, 60, (tokens, 3))
    for dtype in (torch.float32, torch.bfloat16):
        wanted = ops.engram_lookup.implementations["reference"](codes, scale, ids, dtype)
        found = ops.engram_lookup(codes.to("npu"), None if scale is None else scale.to("npu"), ids.to("npu"), dtype)
        assert torch.equal(found.cpu(), wanted)


def test_hashes_are_the_cpus():
    token_map = torch.randint(0, 99_092, (500,))
    token_map[[5, 9]] = reference_ops.DEAD
    ids, lookback = torch.randint(0, 500, (40,)), torch.randint(-1, 500, (3, 3)).int()
    ids[[4, 20]] = 9
    primes = torch.randint(10**7, 2 * 10**7, (2, 3, 8))
    arguments = [ids, token_map, lookback, torch.tensor([0, 17, 18, 36], dtype=torch.int32)]
    arguments += [torch.randint(2**40, 2**46, (2, 4)) * 2 + 1, primes, primes.flatten(1).cumsum(1)]
    found = ops.ngram_rows(*(part.to("npu") for part in arguments), 2)
    assert torch.equal(found.cpu(), ops.ngram_rows(*arguments, 2))


def test_a_second_stream(checkpoint):
    made = tables(checkpoint)
    prefetcher = Prefetcher(torch.device("npu", 0), on=True)
    ids = some_rows(ROWS[4])
    pending = prefetcher.start(lambda rows: made[1].lookup(rows, torch.float32), ids.to("npu"))
    assert torch.equal(pending.wait().cpu(), expected(checkpoint, 4, ids, torch.float32))
    assert prefetcher._stream is not None
    assert prefetcher._stream != torch.npu.current_stream()
    made.close()


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_captured_graph_looks_up_what_its_buffer_holds(checkpoint, prefetch):
    made = tables(checkpoint)
    prefetcher = Prefetcher(torch.device("npu", 0), on=prefetch)
    ids = torch.full((28, 1), ops.DEAD, device="npu")
    out = torch.empty(28, 1, DIM, device="npu")

    def step():
        pending = prefetcher.start(lambda rows: made[1].lookup(rows, torch.float32), ids)
        out.copy_(pending.wait() * 2)

    step()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=torch.npu.Stream()):
        step()
    graph.replay()
    assert not out.any()
    for _ in range(2):
        rows = some_rows(ROWS[4])
        ids.copy_(rows)
        graph.replay()
        assert torch.equal(out.cpu(), 2 * expected(checkpoint, 4, rows, torch.float32))
    torch.npu.synchronize()
    made.close()


def test_a_refused_registration_leaves_nothing(checkpoint):
    from emulated_npu import library

    live = library.LIBRARY.fakecann_live_segments(1)
    library.inject("aclrtHostRegisterV2", 207001, call=5)
    with pytest.raises(AclError, match="chunk_mib"):
        tables(checkpoint)
    library.clear_injections()
    assert library.LIBRARY.fakecann_live_segments(1) == live
