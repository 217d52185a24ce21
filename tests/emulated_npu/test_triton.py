"""Triton kernels in the interpreter, on device memory."""

import pytest
import torch

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu]


def kernels():
    import triton
    import triton.language as tl

    @triton.jit
    def cast(x, y, n, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + i, tl.load(x + i, i < n, 0.0), i < n)

    @triton.jit
    def add(x, y, out, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i) + tl.load(y + i) * 2.0)

    @triton.jit
    def gather(addresses, out, WIDTH: tl.constexpr):
        row = tl.program_id(0)
        source = tl.load(addresses + row).to(tl.pointer_type(tl.float32))
        i = tl.arange(0, WIDTH)
        tl.store(out + row * WIDTH + i, tl.load(source + i))

    return cast, add, gather


def test_bf16_rounds_to_nearest_even():
    cast, _, _ = kernels()
    x = torch.randn(1000, dtype=torch.float32) * torch.logspace(-30, 30, 1000)
    x[:6] = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 3.4e38])
    y = torch.empty(1000, dtype=torch.bfloat16, device="npu")
    cast[(8,)](x.to("npu"), y, 1000, BLOCK=128)
    wanted = x.bfloat16()
    assert torch.equal(y.cpu().nan_to_num(5.0), wanted.nan_to_num(5.0))
    assert torch.isnan(y.cpu()[2])


def test_bf16_computes_in_float():
    _, add, _ = kernels()
    x, y = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.empty(64, dtype=torch.bfloat16, device="npu")
    add[(1,)](x.to("npu"), y.to("npu"), out, BLOCK=64)
    assert torch.allclose(out.cpu().float(), x.float() + 2 * y.float(), atol=0.05)


def test_lengths_need_no_power_of_two():
    _, add, _ = kernels()
    x = torch.arange(12.0, device="npu")
    out = torch.empty(12, device="npu")
    add[(1,)](x, x, out, BLOCK=12)
    assert out.tolist() == [3.0 * i for i in range(12)]


def test_addresses_in_a_table():
    _, _, gather = kernels()
    rows = [torch.full((8,), float(i), device="npu") for i in range(3)]
    out = torch.empty(3, 8, device="npu")
    gather[(3,)](torch.tensor([r.data_ptr() for r in rows], device="npu"), out, WIDTH=8)
    assert out[:, 0].tolist() == [0, 1, 2]


def test_a_host_address_in_a_kernel_is_refused():
    _, add, gather = kernels()
    host, out = torch.ones(8), torch.empty(1, 8, device="npu")
    with pytest.raises(Exception, match="not a device address"):
        gather[(1,)](torch.tensor([host.data_ptr()], device="npu"), out, WIDTH=8)
    with pytest.raises(Exception, match="not a device address"):
        add[(1,)](host, host, out, BLOCK=8)


def test_masked_lanes_are_not_looked_at():
    cast, _, _ = kernels()
    x, y = torch.arange(5.0, device="npu"), torch.zeros(5, device="npu")
    cast[(1,)](x, y, 5, BLOCK=128)
    assert y.tolist() == [0, 1, 2, 3, 4]


def test_kernels_are_captured():
    cast, _, _ = kernels()
    x, y = torch.zeros(8, device="npu"), torch.zeros(8, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=torch.npu.Stream()):
        cast[(1,)](x, y, 8, BLOCK=8)
    x.fill_(4)
    graph.replay()
    assert y.tolist() == [4.0] * 8
