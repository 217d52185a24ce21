"""Seeded inputs for every operator: what ``dsv41 selftest`` and the tests compare implementations on.

Sizes are small but awkward: no powers of two where none is needed, several requests, padding,
unused cache rows filled with NaN (blocks are handed on uncleared).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import indexer, rope
from .batch import Batch, Blocks
from .engram import DEAD
from .moe import NEVER


@dataclass
class Example:
    """Arguments of one call. ``mutated``: the argument that the call writes to, compared afterwards; ``kept``: memory
    that an argument holds the address of; ``refused``: implementations that do not take this form."""

    operator: str
    title: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    mutated: int | None = None
    kept: tuple[Tensor, ...] = ()
    refused: tuple[str, ...] = ()


class _Maker:
    def __init__(self, seed: int, device: str, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float32) * scale
        return values.to(dtype or self.dtype).to(self.device)

    def f32(self, *shape: int, scale: float = 1.0) -> Tensor:
        return self.normal(*shape, scale=scale, dtype=torch.float32)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(dtype).to(self.device)

    def int8(self, *shape: int) -> Tensor:
        return self.integers(-127, 128, *shape, dtype=torch.int8)

    # ---- a batch of three requests in paged caches ----------------------------------------------

    per_block, blocks, lengths, chunks = 8, 24, (37, 5, 90), (3, 5, 1)

    def batch(self) -> Batch:
        start = torch.tensor([0, *self.chunks]).cumsum(0).int().to(self.device)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        return Batch(start, lengths, sum(self.chunks), max(self.chunks), max(self.lengths))

    def block_table(self) -> Tensor:
        order = torch.randperm(self.blocks - 1, generator=self.generator) + 1
        table = torch.zeros(3, 12, dtype=torch.int32)
        used = 0
        for r, length in enumerate(self.lengths):
            count = -(-length // self.per_block)
            table[r, :count] = order[used : used + count].int()
            used += count
        return table.to(self.device)

    def cache(self, table: Tensor, width: int, lengths: tuple[int, ...]) -> Tensor:
        """[blocks, per_block, width], strided over blocks like vLLM's packed caches, NaN where unused."""
        storage = torch.full((self.blocks, self.per_block * width + 24), torch.nan, dtype=self.dtype)
        cache = storage[:, : self.per_block * width].unflatten(1, (self.per_block, width))
        for r, length in enumerate(lengths):
            index = torch.arange(length)
            block = table[r].cpu()[index // self.per_block].long()
            cache[block, index % self.per_block] = self.normal(length, width).cpu()
        placed: Tensor = cache.to(self.device)
        return placed


def _elementary(m: _Maker) -> Iterator[Example]:
    yield Example("rms_norm", "ordinary", (m.normal(7, 96), m.f32(96), 1e-20))
    yield Example("rms_norm", "activations near 1e-8", (m.normal(7, 96, scale=1e-8), m.f32(96), 1e-20))
    yield Example("rms_norm", "no tokens", (m.normal(0, 96), m.f32(96), 1e-20))
    for name in ("rms_norm_cast", "rms_norm_quantize"):
        for title, weight in (("BF16 weight", m.f32(96).bfloat16().float()), ("float32 weight", m.f32(96))):
            yield Example(name, title, (m.normal(7, 96), weight, 1e-20))
            yield Example(name, f"{title}, activations near 1e-8", (m.normal(7, 96, scale=1e-8), weight, 1e-20))
        yield Example(name, "no tokens", (m.normal(0, 96), m.f32(96), 1e-20))
    frequency = rope.rope_frequencies(16, 160000.0, 16.0, 32, 1, 4096).to(m.device)
    rotation = rope.rope_rotation(frequency, torch.tensor([0, 1, 63, 4096, 69999], device=m.device))
    for inverse in (False, True):
        yield Example("apply_rope", f"heads, inverse={inverse}", (m.normal(5, 3, 40), rotation, inverse))
        yield Example("apply_rope", f"rows, inverse={inverse}", (m.normal(5, 40), rotation, inverse))
    yield Example("float_linear", "one row", (m.normal(1, 64), m.normal(48, 64, scale=0.1)))
    yield Example("float_linear", "rows to float32", (m.normal(33, 64), m.normal(48, 64, scale=0.1), torch.float32))
    yield Example("float_linear", "float32 weight", (m.normal(9, 64), m.f32(48, 64, scale=0.1), torch.float32))
    yield Example("grouped_linear", "block-diagonal", (m.normal(9, 4, 64), m.normal(4, 24, 64, scale=0.1)))
    x = m.normal(9, 64)
    x[3] = 0
    yield Example("quantize_per_token", "with a row of zeros", (x,))
    scale = m.f32(9, 1).abs()
    weights = m.int8(48, 640), m.f32(48, 1).abs() * 1e-3
    yield Example("w8a8_matmul", "ordinary", (m.int8(9, 640), scale, *weights, m.dtype))
    yield Example("w8a8_matmul", "one row", (m.int8(1, 640), scale[:1], *weights, m.dtype))
    extreme = torch.full((2, 640), 127, dtype=torch.int8, device=m.device)
    yield Example("w8a8_matmul", "largest sums", (extreme, scale[:2], extreme, scale[:2], m.dtype))


def _hyper_connections(m: _Maker) -> Iterator[Example]:
    streams = m.normal(7, 4, 96)
    fn, base, scale = m.f32(24, 384, scale=0.1), m.f32(24), m.f32(3, scale=0.3)
    yield Example("hc_coefficients", "20 iterations", (streams, fn, scale, base, 20, 1e-6, 1e-20))
    yield Example("hc_coefficients", "tiny streams", (streams * 1e-8, fn, scale, base, 20, 1e-6, 1e-20))
    pre, comb = m.f32(7, 4).sigmoid(), m.f32(7, 4, 4).softmax(-1)
    yield Example("hc_collapse", "ordinary", (streams, pre))
    yield Example("hc_pre", "ordinary", (streams, pre, fn, scale, base, 20, 1e-6, 1e-20))
    yield Example("hc_expand", "ordinary", (m.normal(7, 96), streams, 2 * pre, comb))


def _experts(m: _Maker) -> Iterator[Example]:
    logits, bias = m.f32(33, 16, scale=8.0), m.f32(16, scale=0.2)
    yield Example("route", "one bias", (logits, bias, 4, 1.5))
    flagged, biases = logits.clone(), (bias.clone(), m.f32(16))
    flagged[:, -1] = (torch.arange(33, device=m.device) % 3 == 1).float()
    for each in biases:
        each[-1] = NEVER
    marked = (flagged, biases[0], 4, 1.5, biases[1])
    yield Example("route", "image tokens have a bias of their own", marked)
    flags = 1 - flagged[:, -1].long()  # where they are given, the column is not looked at
    yield Example("route", "image tokens, flags given", (*marked, flags))
    yield Example("route", "ties go to the smallest index", (torch.zeros_like(logits), torch.zeros_like(bias), 4, 1.5))
    yield Example("swiglu", "beyond the limit", (m.normal(9, 48, scale=20.0), 10.0))
    x, weights = m.normal(11, 32), m.f32(11, 4).abs()
    ids = m.integers(0, 9, 11, 4)
    yield Example(
        "moe_float",
        "experts elsewhere, clamped",
        (x, m.normal(6, 48, 32, scale=4.0), m.normal(6, 32, 24), weights, ids, 10.0, 2, 9),
    )
    stacks = (m.int8(6, 48, 32), m.f32(6, 48, 1).abs() * 0.02, m.int8(6, 32, 24), m.f32(6, 32, 1).abs() * 0.01)
    yield Example("moe_w8a8", "experts elsewhere, clamped", (x, *stacks, weights, ids, 10.0, 2, 9))


def _caches(m: _Maker) -> Iterator[Example]:
    table = m.block_table()
    cache = m.cache(table, 20, m.lengths)
    slots = torch.tensor([[9, -1, 16], [-1, 8, 40]], device=m.device)
    flat = torch.nan_to_num(cache)
    yield Example("gather_rows", "with padding", (flat, slots))
    places = torch.tensor([[1, 1], [-1, 0], [2, 0], [0, 7]], dtype=torch.int32, device=m.device)
    yield Example("scatter_rows", "with padding", (flat.clone(), m.normal(4, 20), places), mutated=0)
    yield from _latents(m, table)
    for step in (m.batch(), Batch(m.batch().query_start, torch.tensor([3, 5, 90]).int().to(m.device), 11, 5, 90)):
        ring, table = m.f32(4, 8, 48), torch.tensor([[2, 0], [3, 0], [1, 0]], dtype=torch.int32, device=m.device)
        here = torch.arange(step.tokens, device=m.device)
        arguments = (m.f32(step.tokens, 48), ring, table, step, torch.where(here < 9, here, -1))
        title = f"{step.tokens - 9} tokens are padding"
        yield Example("pool_open_groups", title, arguments)
        yield Example("pool_open_groups", f"the rings, {title}", arguments, mutated=1)
    yield Example("pool_pairs", "ordinary", (m.f32(7, 48), m.f32(7, 48)))


def _latents(m: _Maker, table: Tensor) -> Iterator[Example]:
    """Two caches are written, of which one is compared: each of the two in an example of its own."""
    tokens, width, index = 9, 40, 24
    frequency = rope.rope_frequencies(16, 160000.0, 16.0, 32, 1, 4096).to(m.device)
    rotation = rope.rope_rotation(frequency, m.integers(0, 70000, tokens))
    slots = torch.tensor([9, -1, 16, 17, 40, -1, 23, 8, 31], device=m.device)
    kv, weight = m.normal(tokens, 2 * width)[:, width:], m.f32(width)
    window = torch.nan_to_num(m.cache(table, width, m.lengths))
    given = (kv, weight, 1e-20, rotation)
    yield Example("store_latents", "rows", (m.normal(tokens, 3, width), *given, window.clone(), slots), mutated=5)
    yield Example("store_latents", "queries", (m.normal(tokens, 3, width), *given, window.clone(), slots.int()))
    yield Example("store_latents", "rows alone", (None, *given, window.clone(), slots.int()), mutated=5)
    yield Example("store_latents", "in order", (None, *given, m.normal(1, tokens, width), None), mutated=5)
    rows, keys = torch.nan_to_num(m.cache(table, width, m.lengths)), torch.nan_to_num(m.cache(table, index, m.lengths))
    latent, key, weight = m.normal(tokens, width), m.normal(tokens, index), m.f32(index)
    codes = torch.zeros(m.blocks, m.per_block * index + 32, dtype=torch.int8, device=m.device)
    codes = codes[:, : m.per_block * index].unflatten(1, (m.per_block, index))
    scales = torch.zeros(m.blocks, m.per_block, dtype=torch.float16, device=m.device)
    places: tuple[Any, ...]
    for ratio in (1, 2):
        places = (rows.clone(), slots, keys.clone(), None, slots.roll(1), ratio)
        common = (latent, key, weight, 1e-20, rotation)
        yield Example("store_compressed", f"rows of {ratio}", (*common, *places), mutated=5)
        yield Example("store_compressed", f"keys of {ratio}", (*common, *places), mutated=7)
        places = (rows.clone(), slots, codes.clone(), scales.clone(), slots.roll(1), ratio)
        yield Example("store_compressed", f"INT8 keys of {ratio}", (*common, *places), mutated=7)
        yield Example("store_compressed", f"their scales, {ratio}", (*common, *places), mutated=8)


def _attention(m: _Maker) -> Iterator[Example]:
    batch, ratio = m.batch(), 2
    tokens, heads, width = batch.tokens, 3, 40
    window_table, row_table, key_table = m.block_table(), m.block_table(), m.block_table()
    row_lengths = tuple(length // ratio for length in m.lengths)
    window, rows = m.cache(window_table, width, m.lengths), m.cache(row_table, width, row_lengths)
    keys = m.cache(key_table, 24, row_lengths)
    visible = (batch.positions + 1) // ratio
    q, weights = m.normal(tokens, heads, 24), m.f32(tokens, heads)
    yield Example("quantize_index", "queries", (q,))
    codes, scale = indexer.quantize_index.implementations["reference"](torch.nan_to_num(keys))
    for kind, index in (
        ("", (q, weights, keys, None, batch, key_table)),
        (", INT8", (q, weights, codes, scale, batch, key_table)),
    ):
        refused = () if kind else ("npu",)  # its indexer reads INT8 keys
        candidates = torch.tensor([0, 2, 3, -1], dtype=torch.int32, device=m.device).repeat(tokens, 1)
        for title, more in (
            ("one stage", (6, ratio)),
            ("all rows fit", (64, ratio)),
            ("publishing candidates", (6, ratio, 4, 3)),
            ("among candidates", (6, ratio, 4, 0, candidates)),
        ):
            yield Example("select_rows", f"{title}{kind}", (*index, *more), refused=refused)
    selected = torch.full((tokens, 9), -1, dtype=torch.int32, device=m.device)
    for t, count in enumerate(visible.tolist()):
        chosen = torch.randperm(count, generator=m.generator)[:7].sort().values
        selected[t, : len(chosen)] = chosen.int()
    query, sink = m.normal(tokens, heads, width), m.f32(heads)
    own = (query, batch, window, window_table, 12, sink, width**-0.5)
    yield Example("sparse_attention", "window only", own)
    yield Example("sparse_attention", "window and selected rows", (*own, rows, row_table, selected, ratio))
    last = torch.tensor(m.lengths) - 1
    drafted = m.normal(15, heads, width), m.normal(15, width), Blocks(last, 5)
    yield Example("block_attention", "windows shorter and longer", (*drafted, window, window_table, 12, *own[5:]))


def _released_heads(m: _Maker) -> Iterator[Example]:
    """Head sizes, window, selection and blocks as released, which kernels of NPUs are made for: few tokens, BF16."""
    if m.dtype != torch.bfloat16:
        return
    heads, dim, index_heads, index_dim, window, topk, per_block = 16, 512, 32, 128, 128, 512, 128
    start = torch.tensor([0, 3, 4], dtype=torch.int32, device=m.device)
    lengths = torch.tensor([1500, 131], dtype=torch.int32, device=m.device)
    batch = Batch(start, lengths, 4, 3, 1500)
    order = torch.randperm(31, generator=m.generator).int() + 1
    table = torch.zeros(2, 16, dtype=torch.int32)
    table[0, :12], table[1, :2] = order[:12], order[12:14]
    table = table.to(m.device)
    caches = (m.normal(32, per_block, dim), m.normal(32, per_block, dim))
    query, sink = m.normal(4, heads, dim), m.f32(heads)
    own = (caches[0], table, window, sink, dim**-0.5)
    yield Example("sparse_attention", "released heads, window only", (query, batch, *own))
    q, weights = m.normal(4, index_heads, index_dim), m.f32(4, index_heads) * 0.02
    for ratio in (1, 2):
        keys = m.normal(32, per_block // ratio, index_dim)
        codes, scale = indexer.quantize_index.implementations["reference"](keys)
        index = (q, weights, codes, scale, batch, table, topk, ratio)
        yield Example("select_rows", f"released heads, ratio {ratio}", index)
        chosen = indexer.select_rows.implementations["reference"](
            q.cpu(), weights.cpu(), codes.cpu(), scale.cpu(), batch.to_host(), table.cpu(), topk, ratio
        )[0]
        rows = caches[1][:, : per_block // ratio]
        compressed = (rows, table, chosen.to(m.device), ratio)
        yield Example("sparse_attention", f"released heads, rows of {ratio}", (query, batch, *own, *compressed))
    drafted = m.normal(10, heads, dim), m.normal(10, dim), Blocks(lengths.cpu().long() - 1, 5)
    yield Example("block_attention", "released heads", (*drafted, *own))


def _engram(m: _Maker) -> Iterator[Example]:
    ngrams = m.integers(0, 300, 13, 4)
    ngrams[2, 1] = ngrams[5, 0] = ngrams[6, 2:] = -1
    multipliers = m.integers(2**40, 2**46, 2, 4) * 2 + 1
    primes = torch.tensor([[[331, 337], [347, 349], [353, 359]]] * 2, device=m.device)
    flat = primes.flatten(1)
    yield Example("hash_ngrams", "with dead tokens", (ngrams, multipliers, primes, flat.cumsum(1) - flat, 2))
    token_map = m.integers(0, 300, 50)
    token_map[7] = DEAD
    lookback = torch.tensor([[3, 7, 1], [-1, -1, -1], [9, 2, -1], [5, 5, 5]], dtype=torch.int32, device=m.device)
    start = torch.tensor([0, 5, 6, 12], dtype=torch.int32, device=m.device)  # one token is padding
    constants = (multipliers, primes, flat.cumsum(1) - flat, 2)
    yield Example("ngram_rows", "with dead tokens", (m.integers(5, 9, 13), token_map, lookback, start, *constants))
    yield Example(
        "ngram_rows", "one request", (m.integers(0, 50, 4), token_map, lookback, start[:2] // 5 * 4, *constants)
    )
    ids = m.integers(-3, 60, 13, 6)
    scale = torch.exp2(m.integers(-9, 2, 50, 2).float())
    yield Example("engram_lookup", "INT8, ids outside the shard", (m.int8(50, 64), scale, ids, m.dtype))
    yield Example("engram_lookup", "float", (m.normal(50, 64), None, ids, m.dtype))
    if m.device == "cpu":  # elsewhere the reference cannot read the memory, and storage has its own probe
        codes, factors = m.int8(50, 64), torch.exp2(m.integers(-9, 2, 50, 2).float())
        starts = [[codes[row:].data_ptr(), factors[row:].data_ptr()] for row in range(0, 50, 16)]
        mapped = (torch.tensor(starts), ids, 50, 16, 64, 2, m.dtype)
        yield Example("engram_lookup_mapped", "chunks of 16 rows", mapped, kept=(codes, factors))
    dead = torch.arange(13, device=m.device) == 4
    arguments = (m.normal(13, 4, 96), m.normal(13, 5 * 96), m.f32(4, 96), dead, 1e-20)
    yield Example("engram_inject", "with a dead token", arguments)


_FAMILIES: tuple[Callable[[_Maker], Iterator[Example]], ...] = (
    _elementary,
    _hyper_connections,
    _experts,
    _caches,
    _attention,
    _released_heads,
    _engram,
)


def examples(seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Iterator[Example]:
    """Inputs for every operator, on ``device``, activations in ``dtype``."""
    for number, family in enumerate(_FAMILIES):
        yield from family(_Maker(seed * len(_FAMILIES) + number, device, dtype))
