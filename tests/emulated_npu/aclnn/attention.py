"""Attention over a paged cache, and writing the cache (for models like Llama)."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from . import operator

_FUSED = (
    "query:T key:L value:L pse_shift:T mask:T lengths:A kv_lengths:A dequant_scale1:T quant_scale1:T "
    "dequant_scale2:T quant_scale2:T quant_offset2:T "
    "antiquant_scale:T antiquant_offset:T block_table:T query_padding:T kv_padding:T key_antiquant_scale:T "
    "key_antiquant_offset:T "
    "value_antiquant_scale:T value_antiquant_offset:T key_prefix:T value_prefix:T prefix_length:A query_rope:T "
    "key_rope:T key_rope_antiquant_scale:T "
    "heads:i scale:d pre_tokens:i next_tokens:i layout:s kv_heads:i sparse_mode:i inner_precise:i block_size:i "
    "antiquant_mode:i lse_flag:b "
    "key_antiquant_mode:i value_antiquant_mode:i out:T lse:T"
)


@operator(
    "aclnnScatterPaKvCache",
    "key:T key_cache:T slots:T value:T value_cache:T compress_lens:T compress_offset:T seq_lens:T cache_mode:s "
    "scatter_mode:s strides:A offsets:A",
)
def scatter_kv_cache(a: SimpleNamespace) -> None:
    """Row i goes to block slots[i] // block size, row slots[i] % block size; negative slots are skipped."""
    kept = a.slots >= 0
    slots = a.slots[kept].long()
    rows = a.key_cache.shape[1]
    for source, cache in ((a.key, a.key_cache), (a.value, a.value_cache)):
        cache[slots // rows, slots % rows] = source[kept]


def _cached(a: SimpleNamespace, cache: torch.Tensor, request: int, length: int, kv_heads: int) -> torch.Tensor:
    """-> [length, kv_heads, head size] of one request."""
    positions = torch.arange(length)
    blocks = a.block_table[request][positions // a.block_size].long()
    return cache.view(cache.shape[0], a.block_size, kv_heads, -1)[blocks, positions % a.block_size]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """q [n, H, D], k and v [m, H', D] -> [n, H, D]; the last query sees everything."""
    k, v = (t.float().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if causal:
        n, m = logits.shape[1:]
        logits = logits.masked_fill(torch.ones(n, m).tril(m - n) == 0, float("-inf"))
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)


@operator("aclnnFusedInferAttentionScoreV3", _FUSED)
def fused_infer_attention(a: SimpleNamespace) -> None:
    """Layout TND (lengths are cumulative) for prefill and mixed steps, BNSD with one query for decode."""
    kv_heads = a.kv_heads or a.heads
    if a.layout == "BNSD":
        if a.query.shape[2] != 1:
            raise ValueError("fused attention, BNSD: only one query per request is listed")
        for i in range(min(a.query.shape[0], len(a.kv_lengths))):
            if a.kv_lengths[i] <= 0:  # padding of a captured batch
                a.out[i] = 0
                continue
            k, v = (_cached(a, cache[0], i, a.kv_lengths[i], kv_heads) for cache in (a.key, a.value))
            a.out[i, :, 0] = _attend(a.query[i].transpose(0, 1), k, v, a.scale, False)[0].to(a.out.dtype)
        return
    if a.layout != "TND" or a.sparse_mode not in (0, 3):
        raise ValueError(f"fused attention: layout {a.layout}, sparse mode {a.sparse_mode} are not listed")
    begin = 0
    for i, end in enumerate(a.lengths):
        if end > begin:
            if a.block_table is not None:
                k, v = (_cached(a, cache[0], i, a.kv_lengths[i], kv_heads) for cache in (a.key, a.value))
            else:
                start = a.kv_lengths[i - 1] if i else 0
                k, v = a.key[0][start : a.kv_lengths[i]], a.value[0][start : a.kv_lengths[i]]
            a.out[begin:end] = _attend(a.query[begin:end], k, v, a.scale, a.sparse_mode == 3).to(a.out.dtype)
        begin = end
