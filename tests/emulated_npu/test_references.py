"""The references of the operators, each alone: against vllm-ascend's own test references and against DeepSeek's golden
unit data. They are functions of CPU tensors; test_operators.py calls them through the device."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import pad

from emulated_npu.c_ascend import attention, elementwise, hyper_connections, indexer, moe
from emulated_npu.peer.tests_of_rc2 import OPS, functions, indexer_golden

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu]
GOLDEN = Path(__file__).parents[1] / "golden" / "a" / "golden"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def unit(name):
    return load_file(GOLDEN / f"unit_{name}.safetensors")


def within_ulp(found, wanted, ulps=2):
    """BF16 results: a few units in the last place of the row's maximum."""
    step = wanted.float().abs().amax(-1, keepdim=True) * 2.0**-7
    return bool(((found.float() - wanted.float()).abs() <= ulps * step).all())


# ---- hyper-connections ----
def mixed(tokens=9, width=128, dtype=torch.bfloat16):
    return (
        torch.randn(tokens, 4, width).to(dtype),
        torch.randn(24, 4 * width) * 0.05,
        torch.rand(3) * 2,
        torch.rand(24) * 2,
    )


@pytest.mark.parametrize("given", [True, False])
def test_hc_pre_as_rc2s_reference(given):
    theirs = functions("deepseek_v41_utils.py")
    x, fn, scale, base = mixed()
    pre_mix = torch.rand(9, 4) if given else None
    y, post, comb, pre = hyper_connections.npu_hc_pre_v3(x, fn, scale, base, pre_mix)
    layer = SimpleNamespace(norm_eps=1e-6, hc_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20)
    for found, wanted in zip((pre, post, comb), theirs.hc_mixes_reference(layer, x, fn, scale, base), strict=True):
        assert torch.allclose(found, wanted, atol=1e-6)
    wanted = ((pre_mix if given else pre).unsqueeze(-1) * x.float()).sum(1).bfloat16()
    assert torch.equal(y, wanted)


def test_hc_pre_within_the_kernels_arithmetic():
    """rc2's golden of the kernel multiplies in HF32 (10 mantissa bits, towards zero): the distance it allows itself."""
    names = {
        "FP32_MANTISSA_BITS": 23,
        "HF32_MANTISSA_BITS": 10,
        "NORM_EPS": 1e-6,
        "HC_EPS": 1e-6,
        "HC_MULT": 4,
        "HC_SINKHORN_ITERS": 20,
    }
    theirs = functions(OPS + "test_npu_hc_pre.py", **names)
    x, fn, scale, base = mixed()
    pre_mix = torch.rand(9, 4)
    found, wanted = (
        hyper_connections.npu_hc_pre_v3(x, fn, scale, base, pre_mix),
        theirs._hc_pre_cpu(x, fn, scale, base, pre_mix),
    )
    for a, b, bound in zip(found, wanted, (4e-3, 2e-3, 2e-3, 2e-3), strict=True):
        assert ((a.float() - b.float()).abs() <= bound * b.float().abs().clamp_min(1)).float().mean() > 0.98


def test_hyper_connections_as_golden():
    u = unit("hyper_connections")
    residual, out = u["stream"][0], u["sublayer_out"][0]
    found = hyper_connections.npu_hc_post(out, residual, u["layer0.post"][0], u["layer0.comb"][0])
    assert within_ulp(found, u["hc_post"][0])
    theirs = functions("deepseek_v41_utils.py").hc_post_reference(
        out.float(), residual.float(), u["layer0.post"][0], u["layer0.comb"][0]
    )
    assert within_ulp(found, theirs)


# ---- attention ----
def paged(requests, width, rows=16, blocks=40):
    """Caches with shuffled blocks: -> (cache [blocks, rows, 1, width] BF16, table int32, contents per request)."""
    cache = torch.full((blocks, rows, 1, width), float("nan"), dtype=torch.bfloat16)
    order, columns = torch.randperm(blocks).tolist(), max(-(-n // rows) for n in requests)
    table, contents = torch.zeros(len(requests), columns, dtype=torch.int32), []
    for r, n in enumerate(requests):
        content = torch.randn(n, width).bfloat16()
        for b in range(-(-n // rows)):
            table[r, b] = order.pop()
            part = content[b * rows : (b + 1) * rows]
            cache[table[r, b], : len(part), 0] = part
        contents.append(content)
    return cache, table, contents


def mla_call(q, lengths, queries, window, table, cache, sinks, **more):
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return attention.npu_sparse_flash_mla(
        q,
        ori_kv=cache,
        ori_block_table=table,
        cu_seqlens_q=starts,
        seqused_ori_kv=torch.tensor(lengths, dtype=torch.int32),
        sinks=sinks,
        metadata=torch.zeros(1024, dtype=torch.int32),
        softmax_scale=q.shape[-1] ** -0.5,
        ori_mask_mode=4,
        ori_win_left=window - 1,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_BBND",
        **more,
    )[0]


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_sparse_attention_as_rc2s_reference(ratio):
    """Chunks of several requests, a window, selected compressed rows with -1 among them, sinks."""
    theirs = functions("deepseek_v41_utils.py")
    lengths, queries, width, heads, window, topk = [45, 7, 100], [5, 7, 1], 64, 4, 16, 12
    cache, table, _ = paged(lengths, width)
    positions = torch.cat([torch.arange(n - k, n) for n, k in zip(lengths, queries, strict=True)])
    q, sinks = torch.randn(sum(queries), heads, width).bfloat16(), torch.randn(heads)
    starts = torch.tensor([0, *queries]).cumsum(0)
    metadata = SimpleNamespace(
        query_start_loc=starts, seq_lens=torch.tensor(lengths), block_table=table, storage_block_size=16
    )
    more, theirs_more = {}, {}
    if ratio:
        used = [n // ratio for n in lengths]
        compressed, compressed_table, _ = paged(used, width)
        picked = torch.full((sum(queries), 1, topk), -1, dtype=torch.int32)
        for t, p in enumerate(positions.tolist()):
            visible = (p + 1) // ratio
            chosen = torch.randperm(visible)[: topk - 2].sort()[0].int()
            picked[t, 0, : len(chosen)] = chosen
        more = {
            "cmp_kv": compressed,
            "cmp_block_table": compressed_table,
            "cmp_sparse_indices": picked,
            "cmp_ratio": ratio,
            "cmp_mask_mode": 3,
            "seqused_cmp_kv": torch.tensor(used, dtype=torch.int32),
        }
        if ratio == 2:
            more["cmp_residual_kv"] = torch.tensor([n % 2 for n in lengths], dtype=torch.int32)
        source = SimpleNamespace(cache_seq_lens=used, block_table=compressed_table, storage_block_size=16)
        theirs_more = {
            "source_cache": compressed,
            "source_metadata": source,
            "compress_ratio": ratio,
            "compressed_indices": picked[:, 0],
        }
    found = mla_call(q, lengths, queries, window, table, cache, sinks, **more)
    wanted = theirs.small_op_attention(
        q, positions, cache, metadata, window_size=window, sinks=sinks, softmax_scale=width**-0.5, **theirs_more
    )
    assert within_ulp(found, wanted, 1)


def test_sparse_attention_as_golden():
    """DeepSeek's own function: two rows of a batch, listed positions with -1, one query that sees nothing."""
    u = unit("sparse_attention")
    batch, tokens, heads, width = u["q"].shape
    total = u["kv"].shape[1]
    pages = pad(u["kv"], (0, 0, 0, -total % 16)).reshape(-1, 16, 1, width)
    table = torch.arange(batch * (pages.shape[0] // batch), dtype=torch.int32).view(batch, -1)
    listed = torch.full((batch * tokens, 1, u["topk_idxs"].shape[-1]), -1, dtype=torch.int32)
    counts = torch.zeros(batch * tokens, 1, dtype=torch.int32)
    for t, row in enumerate(u["topk_idxs"].flatten(0, 1)):
        kept = row[row >= 0]
        listed[t, 0, : len(kept)], counts[t, 0] = kept, len(kept)
    out, _ = attention.npu_sparse_flash_mla(
        u["q"].flatten(0, 1),
        ori_kv=pages,
        ori_block_table=table,
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32) * tokens,
        seqused_ori_kv=torch.full((batch,), total, dtype=torch.int32),
        ori_sparse_indices=listed,
        ori_topk_length=counts,
        sinks=u["attn_sink"],
        metadata=torch.zeros(1024, dtype=torch.int32),
        softmax_scale=float(u["softmax_scale"]),
        ori_mask_mode=0,
        ori_win_left=15,
        ori_win_right=0,
        layout_q="TND",
        layout_kv="PA_BBND",
    )
    assert within_ulp(out.view(batch, tokens, heads, width), u["out_fp32"])


def test_sparse_attention_refuses_other_forms():
    cache, table, _ = paged([20], 64)
    q, sinks = torch.randn(2, 4, 64).bfloat16(), torch.zeros(4)
    for broken in ({"cmp_ratio": 1}, {"cmp_ratio": 2, "cmp_kv": cache, "cmp_mask_mode": 3}):
        with pytest.raises(ValueError, match="npu_sparse_flash_mla: expected"):
            mla_call(q, [20], [2], 16, table, cache, sinks, **broken)
    with pytest.raises(ValueError, match="int32 tables"):
        mla_call(q, [20], [2], 16, table.long(), cache, sinks)


# ---- the indexer ----
def test_index_selection_as_the_kernels_golden():
    """The CPU golden that vllm-ascend keeps beside the kernel: INT8, FP16 weights, ratio 2, paged."""
    theirs = indexer_golden()
    parameters = (
        1,
        4,
        64,
        4,
        0,
        32,
        1,
        128,
        32,
        2,
        "INT8",
        "FP16",
        "INT32",
        "[0,4]",
        None,
        None,
        "[64]",
        "[1]",
        4,
        2,
        "TND",
        "PA_BBND",
        16,
        3,
        "[-50,50]",
        "[-50,50]",
        "[0,1]",
        "[0,1]",
        "[0,1]",
        2,
        0,
        None,
    )
    d = theirs.generate_qliv2_test_data(parameters)
    rows, _, _ = indexer.npu_quant_lightning_indexer_v3(
        d["query"],
        d["key"],
        d["weights"].half(),
        d["query_dequant_scale"].half(),
        d["key_dequant_scale"].half(),
        16,
        2,
        cu_seqlens_q=d["cu_seqlens_query"].int(),
        seqused_k=d["seqused_k"].int(),
        cmp_residual_k=d["cmp_residual_k_for_npu"].int(),
        block_table=d["block_table"].int(),
        metadata=torch.zeros(1024, dtype=torch.int32),
        cmp_ratio=2,
    )
    assert torch.equal(rows, d["cpu_result"])


def index_inputs(lengths, queries, heads=8):
    cache, table, _contents = paged(lengths, 128)
    scale = torch.rand(*cache.shape[:3]).half() + 0.1
    key = (cache.float().nan_to_num(0) * 40).round().clamp(-127, 127).to(torch.int8)
    query = torch.randint(-127, 128, (sum(queries), heads, 128), dtype=torch.int8)
    weights, query_scale = torch.randn(sum(queries), heads).half(), torch.rand(sum(queries), heads).half() + 0.1
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    common = {
        "cu_seqlens_q": starts,
        "seqused_k": torch.tensor(lengths, dtype=torch.int32),
        "block_table": table,
        "cmp_ratio": 1,
        "metadata": torch.zeros(1024, dtype=torch.int32),
    }
    scores = []
    for r, n in enumerate(lengths):
        positions = torch.arange(n)
        k, s = (
            attention.paged_rows(key, table[r], positions),
            scale[table[r][positions // 16].long(), positions % 16, 0],
        )
        part = slice(int(starts[r]), int(starts[r + 1]))
        scores.append(indexer.scores(query[part], k, weights[part] * query_scale[part], s))
    return (query, key, weights, query_scale, scale), common, scores


def test_two_level_selection_as_rc2s_reference():
    """Candidate blocks from one layer, used by another: compared through the scores, as sets."""
    theirs = functions("deepseek_v41_utils.py")
    lengths, queries, topk, blocks, size = [150, 40], [6, 3], 16, 6, 8
    inputs, common, scores = index_inputs(lengths, queries)
    _, _, candidates = indexer.npu_quant_lightning_indexer_v3(
        *inputs, topk, 2, **common, candidate_mode=1, candidate_topk_blocks=blocks, candidate_block_size=size
    )
    rows, _, _ = indexer.npu_quant_lightning_indexer_v3(
        *inputs,
        topk,
        2,
        **common,
        candidate_topk_index=candidates,
        candidate_mode=2,
        candidate_topk_blocks=blocks,
        candidate_block_size=size,
    )
    t = 0
    for r, (n, q) in enumerate(zip(lengths, queries, strict=True)):
        for i in range(q):
            visible = n - q + i + 1
            logits = scores[r][i].masked_fill(torch.arange(n) >= visible, -torch.inf)
            mask = theirs.select_candidate_blocks(logits, visible, blocks, size)
            ours = torch.zeros(n, dtype=torch.bool)
            for b in candidates[t, 0][candidates[t, 0] >= 0].tolist():
                ours[b * size : (b + 1) * size] = True
            assert torch.equal(ours[:visible], mask[:visible])
            wanted = theirs.select_index_topk(logits.masked_fill(~mask, -torch.inf), visible, topk)
            finite = int((logits.masked_fill(~mask, -torch.inf) > -torch.inf).sum())
            assert (
                set(rows[t, 0][rows[t, 0] >= 0].tolist()) == set(wanted[wanted >= 0].tolist()[: max(finite, 0)])
                or finite < topk
            )
            t += 1


def test_candidate_blocks_as_golden():
    u = unit("candidates")
    size, k = int(u["block_size"]), int(u["topk_blocks"])
    scores, visible = u["scores"].float(), u["visible"]
    hidden = torch.arange(scores.shape[1]) >= visible[:, None]
    blocks = indexer._best_blocks(scores.masked_fill(hidden, -torch.inf), visible, size, k)
    mask = torch.zeros(scores.shape[0], -(-scores.shape[1] // size) + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(blocks >= 0, blocks, mask.shape[1] - 1).long(), True)
    found = mask[:, :-1].repeat_interleave(size, 1)[:, : scores.shape[1]] & ~hidden
    assert torch.equal(found, u["mask"] & ~hidden)


def test_skipping_the_candidate_stage_shows_in_selections():
    inputs, common, _ = index_inputs([150], [6])
    arguments = {"candidate_topk_blocks": 4, "candidate_block_size": 8}
    _, _, candidates = indexer.npu_quant_lightning_indexer_v3(*inputs, 16, 2, **common, candidate_mode=1, **arguments)
    with_stage, _, _ = indexer.npu_quant_lightning_indexer_v3(
        *inputs, 16, 2, **common, candidate_topk_index=candidates, candidate_mode=2, **arguments
    )
    without, _, _ = indexer.npu_quant_lightning_indexer_v3(*inputs, 16, 2, **common, candidate_mode=3)
    assert not torch.equal(with_stage.sort()[0], without.sort()[0])


# ---- experts ----
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate_as_rc2s_reference(dtype):
    theirs = functions(OPS + "test_npu_moe_gating_top_k_hash.py", IMAGE_SENTINEL_LO=129257, IMAGE_SENTINEL_COUNT=5)
    logits, bias, bias_vl = (
        torch.randn(8, 64).to(dtype),
        (torch.randn(64) * 0.2).to(dtype),
        (torch.randn(64) * 0.2).to(dtype),
    )
    ids = torch.tensor([11, 129257, 22, 129259, 33, 129261, 44, 129262])
    weights, experts, _ = moe.moe_gating_top_k_hash(
        logits, 6, bias=bias, input_ids=ids, routed_scaling_factor=2.5, norm_type=2, bias_vl=bias_vl
    )
    wanted = theirs._reference(logits, bias, bias_vl, ids, None, 6, 2.5)
    assert torch.equal(experts, wanted[1])
    assert torch.allclose(weights.float(), wanted[0].float(), rtol=1e-5 if dtype == torch.float32 else 1e-2)


def test_grouped_swiglu_as_rc2s_reference():
    theirs = functions(OPS + "test_gmm_swiglu_quant_weight_nz_tensor_list.py")
    counts = torch.tensor([3, 3, 10, 17])
    x, weight = (
        torch.randint(-128, 128, (17, 64), dtype=torch.int8),
        torch.randint(-128, 128, (4, 64, 96), dtype=torch.int8),
    )
    scale, per_token = torch.rand(4, 96) * 0.01, torch.rand(17) * 0.01 + 1e-3
    codes, out_scale, _ = moe.grouped_matmul_swiglu_quant_weight_nz(x, weight, scale, per_token, counts)
    wanted, wanted_scale = theirs.process_groups(x, weight, scale, per_token, counts)
    assert (codes.int() - wanted.int()).abs().max() <= 1
    assert torch.allclose(out_scale, wanted_scale, rtol=1e-5)
    listed = moe.grouped_matmul_swiglu_quant_weight_nz_tensor_list(x, list(weight), list(scale), per_token, counts)
    assert torch.equal(listed[0], codes)


def test_swiglu_limit_cuts_the_gate_from_above_only():
    x = torch.tensor([[30.0, -30.0, 5.0, 30.0, -30.0, 2.0]])
    gate, up = torch.tensor([10.0, -30.0, 5.0]), torch.tensor([10.0, -10.0, 2.0])
    assert torch.allclose(moe.clamped_swiglu(x, 10.0), torch.nn.functional.silu(gate) * up)


def test_dequantising_swiglu_takes_the_raw_accumulator():
    x = torch.randint(-30000, 30000, (5, 64), dtype=torch.int32)
    weight_scale, activation_scale = torch.rand(64) * 1e-3, torch.rand(5) * 0.1
    codes, scale = moe.npu_dequant_swiglu_quant(
        x,
        weight_scale=weight_scale,
        activation_scale=activation_scale,
        quant_mode=1,
        swiglu_mode=1,
        clamp_limit=3.0,
        activate_left=True,
    )
    gate_up = x.float() * weight_scale * activation_scale[:, None]
    wanted = torch.nn.functional.silu(gate_up[:, :32].clamp(max=3.0)) * gate_up[:, 32:].clamp(-3.0, 3.0)
    assert torch.allclose(codes.float() * scale[:, None], wanted, atol=float(wanted.abs().max()) / 127)


# ---- elementwise ----
@pytest.mark.parametrize("negate", [False, True])
def test_rotary_as_rc2s_reference(negate):
    theirs = functions(OPS + "test_inplace_partial_rotary_mul.py", NOPE_DIM=128, HEAD_DIM=192)
    x, angle = torch.randn(7, 1, 16, 192).bfloat16(), torch.randn(7, 1, 1, 64)
    wanted = theirs.golden_inplace_partial_rotary_mul(x, angle.cos(), angle.sin(), negate)
    elementwise.inplace_partial_rotary_mul(x, angle.cos(), angle.sin(), "interleave", [128, 192], negate)
    assert torch.allclose(x.float(), wanted, atol=8e-3, rtol=8e-3)


def test_scatter_as_rc2s_reference():
    theirs = functions("deepseek_v41_utils.py")
    cache = torch.zeros(6, 16, 2, 8)[:, :, 0]  # strided, as a view of a packed page
    expected = cache.clone().unsqueeze(-2)
    slots = torch.tensor([5, -1, 33, 95])
    update = torch.randn(4, 8)
    coordinates = torch.stack(
        [torch.where(slots < 0, -1, slots // 16), torch.where(slots < 0, -1, slots % 16)], -1
    ).int()
    elementwise.npu_scatter_nd_update_sk(cache, coordinates, update)
    theirs.scatter_cache(expected, torch.tensor([5, 33, 95]), update[[0, 2, 3]])
    assert torch.equal(cache, expected.squeeze(-2))
    with pytest.raises(ValueError, match="outside"):
        elementwise.npu_scatter_nd_update_sk(cache, torch.tensor([[6, 0]], dtype=torch.int32), update[:1])


def test_add_rms_norm_bias_as_rc2s_reference():
    theirs = functions(OPS + "test_add_rms_norm_bias.py")
    x1, _x2, gain, bias = (torch.randn(6, 64) for _ in range(2)), None, torch.randn(64), torch.randn(64)
    a, b = x1
    wanted = theirs.npu_add_rms_norm_bias_golden(a, b, gain, bias, 3)
    y, _, total = elementwise.npu_add_rms_norm_bias(a, b, gain, bias)
    assert torch.allclose(y, wanted[0].view(6, 64), rtol=1e-5, atol=1e-5)
    assert torch.equal(total, a + b)
