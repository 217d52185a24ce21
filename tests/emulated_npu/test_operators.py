"""Operators through the device: the real torch_npu, or the dispatcher for _C_ascend, selects them."""

import pytest
import torch

from emulated_npu.test_references import within_ulp

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def quantised(tokens=5, k=64, n=96):
    import torch_npu

    torch.npu.config.allow_internal_format = True
    x, weight = torch.randn(tokens, k).bfloat16(), torch.randint(-127, 128, (k, n), dtype=torch.int8)
    codes, scale = torch_npu.npu_dynamic_quant(x.to("npu"))
    return x, weight, codes, scale, torch.rand(n) * 0.01


def test_quantised_product_and_its_formats():
    import torch_npu

    _x, weight, codes, scale, channel = quantised()
    wanted = (codes.cpu().double() @ weight.double()).float() * channel * scale.cpu()[:, None]
    plain = torch_npu.npu_quant_matmul(
        codes, weight.to("npu"), channel.to("npu"), pertoken_scale=scale, output_dtype=torch.bfloat16
    )
    nz = torch_npu.npu_format_cast(weight.to("npu"), 29)
    tiled = torch_npu.npu_quant_matmul(codes, nz, channel.to("npu"), pertoken_scale=scale, output_dtype=torch.bfloat16)
    assert torch.equal(plain.cpu(), wanted.bfloat16())
    assert torch.equal(tiled.cpu(), plain.cpu())
    raw = torch_npu.npu_quant_matmul(codes, nz, channel.to("npu"), output_dtype=torch.int32)
    assert torch.equal(raw.cpu().long(), codes.cpu().long() @ weight.long())
    assert torch_npu.get_npu_format(nz) == 29


def test_nz_is_a_layout():
    import torch_npu

    from emulated_npu import formats, memory

    torch.npu.config.allow_internal_format = True
    weight = torch.arange(48 * 70, dtype=torch.int32).to(torch.int8).view(48, 70)
    nz = torch_npu.npu_format_cast(weight.to("npu"), 29)
    stored = memory.view(nz.data_ptr(), torch.int8, (48 * 70,), (1,))
    assert not torch.equal(stored, weight.flatten()), "the bytes are tiled"
    assert torch.equal(formats.plain(nz), weight)
    assert torch.equal(torch_npu.npu_format_cast(nz, 2).cpu(), weight)
    for use in (lambda: nz + 1, lambda: nz.t().contiguous(), lambda: nz[:16].clone()):
        with pytest.raises(RuntimeError, match="FRACTAL_NZ"):
            use()


def test_wrong_calls_of_quantised_products():
    import torch_npu

    torch.npu.config.allow_internal_format = True
    x, weight, codes, scale, channel = quantised()
    w, c = weight.to("npu"), channel.to("npu")
    with pytest.raises(RuntimeError):
        torch_npu.npu_quant_matmul(
            codes, w.t().contiguous(), c, pertoken_scale=scale, output_dtype=torch.bfloat16
        )  # transposed weight
    with pytest.raises(RuntimeError):
        torch_npu.npu_quant_matmul(x.to("npu"), w, c, pertoken_scale=scale, output_dtype=torch.bfloat16)  # wrong dtype
    with pytest.raises(RuntimeError):
        torch_npu.npu_quant_matmul(
            codes, w, c[:5].contiguous(), pertoken_scale=scale, output_dtype=torch.bfloat16
        )  # swapped scales


def test_swapped_scales_are_noticed():
    """The scales of rows and of columns have different lengths: exchanged, they do not fit."""
    import torch_npu

    torch.npu.config.allow_internal_format = True
    _, weight, codes, scale, channel = quantised()
    with pytest.raises(RuntimeError, match="96 scales expected"):
        torch_npu.npu_quant_matmul(
            codes, weight.to("npu"), scale, pertoken_scale=channel.to("npu"), output_dtype=torch.bfloat16
        )


def test_strides_are_honoured():
    """A view must not be read as if it were contiguous; the recorder shows its strides."""
    import torch_npu

    from emulated_npu import recorder

    x, gain = torch.randn(64, 6), torch.ones(64, device="npu")
    view = x.to("npu").t()
    with recorder.recording() as record:
        found = torch_npu.npu_rms_norm(view, gain, 1e-6)[0]
    wanted = x.t() * torch.rsqrt(x.t().square().mean(-1, keepdim=True) + 1e-6)
    assert torch.allclose(found.cpu(), wanted, rtol=1e-5, atol=1e-6)
    assert any("f32[6,64]:1,6" in line or "aten::copy_" in line or "contiguous" in line for line in record.lines)


def test_grouped_products():
    import torch_npu

    torch.npu.config.allow_internal_format = True
    x, weight = torch.randn(9, 32).bfloat16(), torch.randn(3, 32, 48).bfloat16()
    counts = torch.tensor([2, 0, 7])
    arguments = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts.to("npu")}
    (found,) = torch_npu.npu_grouped_matmul(x=[x.to("npu")], weight=[weight.to("npu")], **arguments)
    wanted = torch.cat([x[:2].float() @ weight[0].float(), x[2:].float() @ weight[2].float()])
    assert within_ulp(found.cpu(), wanted, 1)


def test_routing_and_back():
    import torch_npu

    x, experts = torch.randn(6, 16).bfloat16(), torch.stack([torch.randperm(8)[:3] for _ in range(6)]).int()
    rows, index, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x.to("npu"),
        experts.to("npu"),
        active_num=18,
        expert_num=8,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, 8],
        quant_mode=-1,
    )
    flat = experts.flatten().long()
    assert counts.tolist() == torch.bincount(flat, minlength=8).tolist()
    order = flat.argsort(stable=True)
    assert torch.equal(rows.cpu(), x[order // 3])
    weights = torch.rand(6, 3)
    back = torch_npu.npu_moe_token_unpermute(rows, index.abs(), weights.to("npu"))
    assert within_ulp(back.cpu(), x.float() * weights.sum(1, keepdim=True), 1)


def test_custom_operators_check_schema_and_format():
    import torch_npu
    import vllm_ascend.vllm_ascend_C  # noqa: F401

    torch.npu.config.allow_internal_format = True
    x, weight = (
        torch.zeros(4, 64, dtype=torch.int8, device="npu"),
        torch.ones(2, 64, 64, dtype=torch.int8, device="npu"),
    )
    scale, per_token, counts = (
        torch.ones(2, 64, device="npu"),
        torch.ones(4, device="npu"),
        torch.tensor([1, 4], device="npu"),
    )
    operator = torch.ops._C_ascend.grouped_matmul_swiglu_quant_weight_nz
    with pytest.raises(RuntimeError, match="must be FRACTAL_NZ"):
        operator(x, weight, scale, per_token, counts)
    operator(x, torch_npu.npu_format_cast(weight, 29), scale, per_token, counts)
    with pytest.raises((RuntimeError, TypeError), match="x_scale"):
        operator(x, weight, scale, per_token_scale=per_token, group_list=counts)
    with pytest.raises(NotImplementedError, match="_C_ascend::npu_hc_pre_v2 has no reference"):
        torch.ops._C_ascend.npu_hc_pre_v2(
            torch.zeros(1, 4, 8, device="npu").bfloat16(), scale, scale, scale, 4, 20, 1e-6, 1e-6
        )


def test_recorder_notices_a_changed_call():
    import torch_npu

    from emulated_npu import recorder

    x, gain = torch.ones(2, 64, device="npu"), torch.ones(64, device="npu")

    def work(epsilon, dtype=torch.float32):
        with recorder.recording() as record:
            with recorder.labelled("layer 0"):
                torch_npu.npu_rms_norm(x.to(dtype), gain.to(dtype), epsilon)
            torch.softmax(x, -1)
        return record

    first = work(1e-6)
    assert "aclnn aclnnRmsNorm(x=f32[2,64], gamma=f32[64], epsilon=1e-06, y=f32[2,64], rstd=f32[2,1])" in first.lines
    assert first.labels["layer 0"]["aclnnRmsNorm"] == 1
    assert first.counts["aten::_softmax"] == 1
    assert recorder.difference(first.lines, work(1e-6).lines) == ""
    assert "-aclnn aclnnRmsNorm(x=f32[2,64], gamma=f32[64], epsilon=1e-06" in recorder.difference(
        first.lines, work(1e-5).lines
    )
    assert "bf16[2,64]" in recorder.difference(first.lines, work(1e-6, torch.bfloat16).lines)
