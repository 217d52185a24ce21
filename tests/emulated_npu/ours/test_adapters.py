"""The adapters of ops/npu against the references, through the real torch_npu and vllm-ascend's schemas; and wrong
calls, each of which must be noticed: by an error, or by a result beyond its bound."""

import pytest
import torch

from vllm_ascend_dsv41.ops import operators
from vllm_ascend_dsv41.ops.compare import compare

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu]
# engram_lookup_mapped reads memory that the reference cannot (tests/emulated_npu/test_engram.py); the others are parts
# of operators that have kernels of their own
NONE = {"engram_lookup_mapped", "gather_rows", "hash_ngrams", "pool_pairs", "scatter_rows"}


@pytest.fixture(autouse=True)
def extension(monkeypatch):
    monkeypatch.delenv("EMULATED_TRITON")
    import torch_npu  # noqa: F401
    from vllm_ascend.utils import enable_custom_op

    torch.npu.config.allow_internal_format = True  # as vllm-ascend's worker
    torch.zeros(1, device="npu")
    assert enable_custom_op()


@pytest.mark.parametrize("seed", [0, 1])
def test_adapters_agree_with_the_references(seed):
    results = [r for r in compare(seed, "npu") if r.implementation == "npu"]
    assert not [r for r in results if not r.passed]
    assert {r.operator for r in results} == {op.name for op in operators()} - NONE


def changed(**how):
    """A wrong call: the named (or numbered) arguments are replaced by a function of themselves."""

    def change(args, kwargs):
        args = list(args)
        for key, function in how.items():
            if key.startswith("_"):
                args[int(key[1:])] = function(args[int(key[1:])])
            else:
                kwargs[key] = function(kwargs.get(key))
        return args, kwargs

    return change


def half(t):
    return t.half()


def bf16(t):
    return t.bfloat16()


def long(t):
    return t.long()


def nothing(_):
    return None


def transposed(t):
    return t.transpose(-1, -2).contiguous()


def row_major(t):
    import torch_npu

    return torch_npu.npu_format_cast(t, 2)


def first_column(t):
    return t[:, :1].contiguous()


ASCEND, NPU = "_C_ascend", "torch_npu"
WRONG = [
    ("rms_norm", NPU, "npu_rms_norm", "weight in FP16", changed(_1=half)),
    ("rms_norm", NPU, "npu_rms_norm", "eps of other models", changed(_2=lambda e: 1e-6)),
    ("rms_norm_cast", ASCEND, "npu_rms_norm_cast", "weight in FP32", changed(_1=lambda w: w.float())),
    ("rms_norm_cast", ASCEND, "npu_rms_norm_cast", "eps of other models", changed(_2=lambda e: 1e-6)),
    ("rms_norm_quantize", ASCEND, "npu_rms_norm_dynamic_quant", "weight in FP16", changed(_1=half)),
    ("rms_norm_quantize", ASCEND, "npu_rms_norm_dynamic_quant", "eps", changed(epsilon=lambda e: 1e-6)),
    ("apply_rope", ASCEND, "inplace_partial_rotary_mul", "halves", changed(rotary_mode=lambda m: "half")),
    ("apply_rope", ASCEND, "inplace_partial_rotary_mul", "always forwards", changed(negate_sin=lambda n: False)),
    ("apply_rope", ASCEND, "inplace_partial_rotary_mul", "first", changed(partial_slice=lambda s: [0, s[1] - s[0]])),
    ("apply_rope", ASCEND, "inplace_partial_rotary_mul", "BF16 angles", changed(_1=bf16)),
    ("hc_pre", ASCEND, "npu_hc_pre_v3", "own coefficients", changed(_4=nothing)),
    ("hc_pre", ASCEND, "npu_hc_pre_v3", "19 iterations", changed(hc_sinkhorn_iters=lambda n: 2)),
    ("hc_pre", ASCEND, "npu_hc_pre_v3", "eps of other models", changed(norm_eps=lambda e: 1e-2)),
    ("hc_expand", ASCEND, "npu_hc_post", "comb transposed", changed(_3=transposed)),
    ("grouped_linear", NPU, "npu_transpose_batchmatmul", "weight as loaded", changed(_1=transposed)),
    ("grouped_linear", NPU, "npu_transpose_batchmatmul", "groups first", changed(perm_y=lambda p: (0, 1, 2))),
    ("w8a8_matmul", NPU, "npu_quant_matmul", "weight as loaded", changed(_1=lambda w: transposed(row_major(w)))),
    ("w8a8_matmul", NPU, "npu_quant_matmul", "no scale of tokens", changed(pertoken_scale=nothing)),
    ("w8a8_matmul", NPU, "npu_quant_matmul", "scale of channels in BF16", changed(_2=bf16)),
    ("w8a8_matmul", NPU, "npu_quant_matmul", "INT32 out", changed(output_dtype=lambda d: torch.int32)),
    ("sparse_attention", ASCEND, "npu_sparse_flash_mla", "a window of one more", changed(ori_win_left=lambda w: w + 1)),
    ("sparse_attention", ASCEND, "npu_sparse_flash_mla", "no sinks", changed(sinks=torch.zeros_like)),
    ("sparse_attention", ASCEND, "npu_sparse_flash_mla", "INT64 table", changed(ori_block_table=long)),
    ("sparse_attention", ASCEND, "npu_sparse_flash_mla", "INT64 lengths", changed(seqused_ori_kv=long)),
    ("sparse_attention", ASCEND, "npu_sparse_flash_mla", "a table of one block", changed(ori_block_table=first_column)),
    ("sparse_attention", ASCEND, "npu_sparse_flash_mla", "no plan", changed(metadata=nothing)),
    ("sparse_attention", ASCEND, "npu_sparse_flash_mla", "scale missing", changed(softmax_scale=lambda s: 1.0)),
    ("block_attention", ASCEND, "npu_sparse_flash_mla", "a window", changed(ori_mask_mode=lambda m: 4)),
    ("block_attention", ASCEND, "npu_sparse_flash_mla", "no window given", changed(ori_win_left=lambda w: -1)),
    ("block_attention", ASCEND, "npu_sparse_flash_mla", "a row fewer", changed(ori_topk_length=lambda n: n - 1)),
    ("select_rows", ASCEND, "npu_quant_lightning_indexer_v3", "FP32 weights", changed(_2=lambda w: w.float())),
    ("select_rows", ASCEND, "npu_quant_lightning_indexer_v3", "FP32 key scale", changed(_4=lambda s: s.float())),
    ("select_rows", ASCEND, "npu_quant_lightning_indexer_v3", "key scale missing", changed(_4=torch.ones_like)),
    ("select_rows", ASCEND, "npu_quant_lightning_indexer_v3", "no residual", changed(cmp_residual_k=torch.zeros_like)),
    ("select_rows", ASCEND, "npu_quant_lightning_indexer_v3", "one stage", changed(candidate_mode=lambda m: 3)),
    ("select_rows", ASCEND, "npu_quant_lightning_indexer_v3", "INT64 table", changed(block_table=long)),
    ("route", ASCEND, "moe_gating_top_k_hash", "no bias", changed(bias=nothing)),
    ("route", ASCEND, "moe_gating_top_k_hash", "no bias of images", changed(bias_vl=nothing)),
    ("route", ASCEND, "moe_gating_top_k_hash", "softmax", changed(norm_type=lambda n: 0)),
    ("route", ASCEND, "moe_gating_top_k_hash", "factor missing", changed(routed_scaling_factor=lambda f: 1.0)),
    ("moe_w8a8", NPU, "npu_moe_init_routing_v2", "others", changed(active_expert_range=lambda r: [0, r[1] - r[0]])),
    ("moe_w8a8", ASCEND, "grouped_matmul_swiglu_quant_weight_nz", "no limit", changed(swiglu_limit=lambda n: 0.0)),
    ("moe_w8a8", ASCEND, "grouped_matmul_swiglu_quant_weight_nz", "row-major", changed(_1=row_major)),
    ("moe_w8a8", ASCEND, "grouped_matmul_swiglu_quant_weight_nz", "counts", changed(_4=lambda c: c.flip(0))),
    ("moe_w8a8", NPU, "npu_grouped_matmul", "no scale of tokens", changed(per_token_scale=nothing)),
    ("moe_w8a8", NPU, "npu_grouped_matmul", "weight as loaded", changed(_1=lambda w: [transposed(row_major(w[0]))])),
    ("moe_w8a8", NPU, "npu_moe_token_unpermute", "weights missing", changed(probs=torch.ones_like)),
    ("moe_w8a8", NPU, "npu_moe_init_routing_v2", "counts", changed(expert_tokens_num_type=lambda t: 1)),
    ("moe_float", NPU, "npu_grouped_matmul", "sums for counts", changed(group_list_type=lambda t: 1)),
    ("moe_float", NPU, "npu_moe_token_unpermute", "BF16 weights", changed(probs=bf16)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "where", "kernel", "change"), [pytest.param(o, w, k, c, id=f"{o}-{t}") for o, w, k, t, c in WRONG]
)
def test_a_wrong_call_is_noticed(monkeypatch, operator, where, kernel, change):
    import torch_npu

    owner = torch.ops._C_ascend if where == ASCEND else torch_npu
    right, calls = getattr(owner, kernel), []

    def wrong(*args, **kwargs):
        calls.append(kernel)
        args, kwargs = change(args, dict(kwargs))
        return right(*args, **kwargs)

    monkeypatch.setattr(owner, kernel, wrong)
    noticed = [r for r in compare(0, "npu", [operator]) if r.implementation == "npu" and not r.passed]
    assert calls
    assert noticed
    assert not [r for r in noticed if "change" in r.refused]
