"""DeepSeek-V4.1 in the order in which data flows, batch of one, any number of tokens per call.

Mathematics: spec section 3; item numbers stand at the definitions. ``[L, hc, D]`` are the streams
of the hyper-connections, L the tokens of one call. Products are formed in float32 and rounded once
to the model's dtype; norms, mixes, gates, router, index scores and logits stay in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from . import engram
from .checkpoint import Checkpoint, Linear
from .config import Config, Rope
from .numerics import Grid, round_int8, round_mxfp4, round_mxfp8, round_nvfp4
from .vision import Vision, merge

Tap = Callable[[str, Tensor], None]  # receives named intermediate values


def ignore(name: str, value: Tensor) -> None:
    """The tap of somebody who wants no intermediate values."""


# ---- elements ----------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """3.2: one rounding at the end; ``eps`` is 1e-20, far below the usual 1e-6."""
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def rope_frequencies(rope: Rope) -> Tensor:
    """3.3: angle per position [dim / 2]; YaRN blends the slow half towards ``1 / factor``."""
    index = torch.arange(rope.dim // 2, dtype=torch.float32)
    # in float32 and in this order, as trained: other roundings are off by 6e-4 at position 65,536
    frequency = 1.0 / rope.theta ** (2 * index / rope.dim)
    if rope.factor == 1.0:
        return frequency

    def bound(beta: float) -> float:
        return rope.dim * math.log(rope.original_positions / (beta * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(bound(rope.beta_fast)), 0)
    high = min(math.ceil(bound(rope.beta_slow)), rope.dim - 1)
    ramp = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequency / rope.factor * ramp + frequency * (1 - ramp)


def rotate(x: Tensor, positions: Tensor, rope: Rope, inverse: bool = False) -> Tensor:
    """Rotate the last ``rope.dim`` values of ``x`` [L, ..., d], neighbours (2i, 2i + 1) together."""
    angle = positions.float()[:, None] * rope_frequencies(rope)
    angle = angle.view(-1, *(1,) * (x.dim() - 2), rope.dim // 2)
    cos, sin = angle.cos(), -angle.sin() if inverse else angle.sin()
    even, odd = x[..., -rope.dim :].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., : -rope.dim], turned.to(x.dtype)), dim=-1)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` largest values of the last dimension; ties go to the smallest index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


def attend(q: Tensor, rows: Tensor, visible: Tensor, sink: Tensor, scale: float) -> Tensor:
    """3.3: softmax attention with keys equal to values and a sink that takes weight but adds nothing.

    q [L, heads, d], rows [n, d], visible [L, n] bool, sink [heads] -> [L, heads, d].
    """
    scores = torch.einsum("lhd,nd->lhn", q.float(), rows.float()) * scale
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    with_sink = torch.cat((scores, sink[None, :, None].expand(len(q), -1, 1)), dim=-1)
    weights = with_sink.softmax(-1)[..., :-1]
    return torch.einsum("lhn,nd->lhd", weights, rows.float()).to(q.dtype)


class Arithmetic:
    """Linears under one activation grid and one dtype."""

    def __init__(self, grid: Grid, dtype: torch.dtype) -> None:
        self.grid, self.dtype = grid, dtype

    def product(self, x: Tensor, linear: Linear) -> Tensor:
        """x [..., in] -> [..., out] float32, activations rounded as the grid and the weight ask."""
        if self.grid is Grid.W8A8 and linear.codes is not None and linear.scale is not None:
            codes, scale = round_int8(x)
            return (codes.double() @ linear.codes.T).float() * scale * linear.scale[:, 0]
        if self.grid is Grid.MX and linear.stored == "mx":
            x = round_mxfp8(x)
        return x.float() @ linear.weight.T

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """As ``product``, rounded to the model's dtype."""
        return self.product(x, linear).to(self.dtype)

    def window_row(self, x: Tensor) -> Tensor:
        """3.4: what the cache keeps of a sliding-window row."""
        return round_mxfp8(x) if self.grid is Grid.MX else x

    def compressed_row(self, x: Tensor) -> Tensor:
        """3.4: what the cache keeps of a compressed row."""
        return round_nvfp4(x) if self.grid is Grid.MX else x

    def index_row(self, x: Tensor) -> Tensor:
        """3.4: what the indexer compares: queries and cached keys."""
        return round_mxfp4(x) if self.grid is Grid.MX else x


# ---- what is remembered of a sequence ----------------------------------------------------------


def _append(store: dict[int, Tensor], layer: int, rows: Tensor) -> Tensor:
    store[layer] = torch.cat((store[layer], rows)) if layer in store else rows
    return store[layer]


@dataclass
class State:
    """One sequence: all its rows are kept, the masks decide what is seen."""

    length: int = 0
    compressed_ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    window: dict[int, Tensor] = field(default_factory=dict)  # layer -> [length, head_dim]
    compressed: dict[int, Tensor] = field(default_factory=dict)  # KV source -> [length // ratio, head_dim]
    index_keys: dict[int, Tensor] = field(default_factory=dict)  # KV source -> [length // ratio, index_head_dim]
    open_group: dict[int, Tensor] = field(default_factory=dict)  # KV source -> input of its incomplete group
    draft_window: dict[int, Tensor] = field(default_factory=dict)  # draft stage -> [length, head_dim]


@dataclass
class Step:
    """One call, shared by its layers. An index source writes ``selected`` (and the candidate source
    ``candidates``) before the layers that read them: sources come first in layer order."""

    positions: Tensor  # [L]
    state: State
    tap: Tap
    image: Tensor  # [L] bool: tokens of image spans
    engram_pad: int = 0  # compressed id that stands for what lies before the text or behind an image
    selected: Tensor | None = None  # [L, n] bool over the compressed rows of the current KV source
    candidates: Tensor | None = None  # [L, n] bool


# ---- attention ---------------------------------------------------------------------------------


class Compressor:
    """3.5: ``ratio`` tokens become one latent. Returns latents before RoPE: the indexer needs those."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, ratio: int, config: Config, arithmetic: Arithmetic):
        self.ratio, self.eps, self.arithmetic = ratio, config.rms_norm_eps, arithmetic
        self.wkv = checkpoint.linear(f"{prefix}.wkv")
        self.wgate = checkpoint.linear(f"{prefix}.wgate") if ratio > 1 else None
        self.norm = checkpoint.vector(f"{prefix}.norm.weight")

    def __call__(self, x: Tensor) -> Tensor:
        """x [groups * ratio, D], whole groups -> [groups, head_dim]."""
        if self.wgate is None:
            return rms_norm(self.arithmetic.linear(x, self.wkv), self.norm, self.eps)
        kv = (x.float() @ self.wkv.weight.T).unflatten(0, (-1, self.ratio))
        weights = (x.float() @ self.wgate.weight.T).unflatten(0, (-1, self.ratio)).softmax(dim=1)
        return rms_norm((weights * kv).sum(1).to(self.arithmetic.dtype), self.norm, self.eps)


class Indexer:
    """3.6: scores compressed rows by small index keys and keeps the best ``index_topk``."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: Config, arithmetic: Arithmetic):
        self.config, self.arithmetic = config, arithmetic
        self.wq_b = checkpoint.linear(f"{prefix}.wq_b")
        self.weights_proj = checkpoint.linear(f"{prefix}.weights_proj")

    def scores(self, x: Tensor, qr: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """x [L, D], qr [L, q_lora_rank], keys [n, index_head_dim] -> [L, n] float32."""
        c = self.config
        q = self.arithmetic.linear(qr, self.wq_b).unflatten(-1, (c.index_n_heads, -1))
        q = self.arithmetic.index_row(rotate(q, positions, c.compressed_rope))
        weights = self.arithmetic.linear(x, self.weights_proj).float()
        weights = weights * (c.index_head_dim**-0.5 * c.index_n_heads**-0.5)
        products = torch.einsum("lhd,nd->lhn", q.float(), keys.float()).relu()
        return torch.einsum("lhn,lh->ln", products, weights)


def candidate_mask(scores: Tensor, visible: Tensor, block_size: int, topk_blocks: int) -> Tensor:
    """First stage: the best blocks by their best row, the block of the newest row always among them.

    scores [L, n], visible [L] (rows each query may see) -> [L, n] bool.
    """
    length, rows = scores.shape
    if not rows:
        return torch.zeros(length, 0, dtype=torch.bool)
    blocks = -(-rows // block_size)
    seen = torch.arange(rows) < visible[:, None]
    padded = F.pad(scores.float().masked_fill(~seen, -torch.inf), (0, blocks * block_size - rows), value=-torch.inf)
    best = padded.view(length, blocks, block_size).amax(-1)
    newest = ((visible - 1) // block_size).clamp_min(0)[:, None]
    best = best.scatter(1, newest, torch.where(visible > 0, torch.inf, -torch.inf)[:, None])
    chosen = top_k(best, min(topk_blocks, blocks))
    keep = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True) & (best > -torch.inf)
    return keep.repeat_interleave(block_size, 1)[:, :rows] & seen


class Attention:
    """3.3: multi-query attention, keys equal to values, over a window and over selected rows."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, layer: int, config: Config, arithmetic: Arithmetic):
        self.layer, self.config, self.arithmetic = layer, config, arithmetic
        trunk = layer < config.num_hidden_layers
        self.ratio = config.compress_ratios[layer] if trunk else 0
        self.rope = config.compressed_rope if self.ratio else config.window_rope
        self.wq_a, self.wq_b, self.wkv, self.wo_a, self.wo_b = (
            checkpoint.linear(f"{prefix}.{name}") for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
        )
        self.q_norm, self.kv_norm = (checkpoint.vector(f"{prefix}.{name}.weight") for name in ("q_norm", "kv_norm"))
        self.sink = checkpoint.vector(f"{prefix}.attn_sink")
        self.compressor = self.indexer = None
        if trunk and layer in config.kv_source_layer_ids:
            self.compressor = Compressor(checkpoint, f"{prefix}.compressor", self.ratio, config, arithmetic)
            self.index_wk = checkpoint.linear(f"{prefix}.indexer.wk")
            self.index_k_norm = checkpoint.vector(f"{prefix}.indexer.k_norm.weight")
        if trunk and layer in config.index_source_layer_ids:
            self.indexer = Indexer(checkpoint, f"{prefix}.indexer", config, arithmetic)

    def queries(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """-> low-rank queries [L, q_lora_rank] and rotated queries [L, heads, head_dim]."""
        qr = rms_norm(self.arithmetic.linear(x, self.wq_a), self.q_norm, self.config.rms_norm_eps)
        q = self.arithmetic.linear(qr, self.wq_b).unflatten(-1, (self.config.num_attention_heads, -1))
        return qr, rotate(q, positions, self.rope)

    def window_rows(self, x: Tensor, positions: Tensor) -> Tensor:
        """-> rows [L, head_dim] for the sliding window."""
        kv = rms_norm(self.arithmetic.linear(x, self.wkv), self.kv_norm, self.config.rms_norm_eps)
        return self.arithmetic.window_row(rotate(kv, positions, self.rope))

    def output(self, mixed: Tensor, positions: Tensor) -> Tensor:
        """[L, heads, head_dim] -> [L, D]: positions rotated out again, then two low-rank steps."""
        mixed = rotate(mixed, positions, self.rope, inverse=True)
        groups = mixed.flatten(1).unflatten(1, (self.config.o_groups, -1))
        wo_a = self.wo_a.weight.unflatten(0, (self.config.o_groups, -1))
        low = torch.einsum("lgd,grd->lgr", groups.float(), wo_a).to(self.arithmetic.dtype)
        return self.arithmetic.linear(low.flatten(1), self.wo_b)

    def publish(self, x: Tensor, step: Step) -> None:
        """A KV source appends the compressed rows and index keys of the groups that became complete."""
        assert self.compressor is not None
        state, layer = step.state, self.layer
        pending = torch.cat((state.open_group[layer], x)) if layer in state.open_group else x
        whole = len(pending) // self.ratio * self.ratio
        state.open_group[layer] = pending[whole:]
        latents = self.compressor(pending[:whole])
        first = len(state.compressed.get(layer, ()))
        positions = torch.arange(first, first + len(latents)) * self.ratio
        rows = rotate(latents, positions, self.rope)
        _append(state.compressed, layer, self.arithmetic.compressed_row(rows))
        keys = rms_norm(self.arithmetic.linear(latents, self.index_wk), self.index_k_norm, self.config.rms_norm_eps)
        _append(state.index_keys, layer, self.arithmetic.index_row(rotate(keys, positions, self.rope)))

    def select(self, x: Tensor, qr: Tensor, step: Step) -> None:
        """An index source decides which compressed rows it and the layers after it attend to."""
        assert self.indexer is not None
        c, step_visible = self.config, (step.positions + 1) // self.ratio
        keys = step.state.index_keys[c.kv_source(self.layer)]
        scores = self.indexer.scores(x, qr, keys, step.positions)
        allowed = torch.arange(len(keys)) < step_visible[:, None]
        if self.layer == c.candidate_source_layer_id:
            step.candidates = candidate_mask(scores, step_visible, c.candidate_block_size, c.candidate_topk_blocks)
            step.tap(f"index{self.layer}.candidates", step.candidates)
        elif 0 <= c.candidate_source_layer_id < self.layer and step.candidates is not None:
            step.tap(f"index{self.layer}.candidates", step.candidates)
            allowed = allowed & step.candidates
        scores = scores.masked_fill(~allowed, -torch.inf)
        chosen = top_k(scores, min(c.index_topk, len(keys)))
        step.selected = torch.zeros_like(allowed).scatter(1, chosen, True) & allowed
        step.tap(f"index{self.layer}.scores", scores)
        step.tap(f"index{self.layer}.selected", step.selected)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [L, D] -> [L, D]."""
        qr, q = self.queries(x, step.positions)
        rows = _append(step.state.window, self.layer, self.window_rows(x, step.positions))
        distance = step.positions[:, None] - torch.arange(len(rows))
        visible = (distance >= 0) & (distance < self.config.sliding_window)
        if self.compressor is not None:
            self.publish(x, step)
        if self.indexer is not None:
            self.select(x, qr, step)
        if self.ratio:
            assert step.selected is not None
            rows = torch.cat((rows, step.state.compressed[self.config.kv_source(self.layer)]))
            visible = torch.cat((visible, step.selected), dim=1)
        mixed = attend(q, rows, visible, self.sink, self.config.head_dim**-0.5)
        return self.output(mixed, step.positions)


# ---- mixture of experts ------------------------------------------------------------------------


def route(scores: Tensor, bias: Tensor, k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """3.8: the bias decides who is chosen, not how much it counts. -> weights, indices [L, k]."""
    chosen = top_k(scores + bias, k)
    weights = scores.gather(1, chosen)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * scaling, chosen


class MoE:
    """3.8: routed experts and one shared expert, with clamped SwiGLU."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, k: int, config: Config, arithmetic: Arithmetic):
        self.checkpoint, self.prefix, self.k = checkpoint, prefix, k
        self.config, self.arithmetic = config, arithmetic
        self.gate = checkpoint.vector(f"{prefix}.gate.weight")
        self.bias = checkpoint.vector(f"{prefix}.gate.bias")
        self.bias_vl = checkpoint.vector(f"{prefix}.gate.bias_vl")
        self._experts: dict[str, tuple[Linear, Linear, Linear]] = {}

    def _weights(self, name: str) -> tuple[Linear, Linear, Linear]:
        if name not in self._experts:
            w1, w2, w3 = (self.checkpoint.linear(f"{self.prefix}.{name}.{w}") for w in ("w1", "w2", "w3"))
            self._experts[name] = (w1, w2, w3)
        return self._experts[name]

    def scores(self, x: Tensor) -> Tensor:
        """[L, D] -> [L, experts] float32; softplus in its stable form, the tail near -30 matters."""
        return F.softplus(x.float() @ self.gate.T).sqrt()

    def expert(self, name: str, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """One expert on x [n, D], scaled by ``weight`` [n, 1] before its second linear."""
        w1, w2, w3 = self._weights(name)
        limit = self.config.swiglu_limit
        gate = self.arithmetic.linear(x, w1).float().clamp_max(limit)
        up = self.arithmetic.linear(x, w3).float().clamp(-limit, limit)
        inner = F.silu(gate) * up
        if weight is not None:
            inner = inner * weight
        return self.arithmetic.linear(inner.to(self.arithmetic.dtype), w2)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [L, D] -> [L, D]."""
        bias = torch.where(step.image[:, None], self.bias_vl, self.bias)
        weights, chosen = route(self.scores(x), bias, self.k, self.config.routed_scaling_factor)
        step.tap(f"{self.prefix}.gate_weights", weights)
        step.tap(f"{self.prefix}.gate_indices", chosen)
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            total[token] += self.expert(f"experts.{expert}", x[token], weights[token, slot, None]).float()
        return (total + self.expert("shared_experts", x).float()).to(self.arithmetic.dtype)


# ---- hyper-connections -------------------------------------------------------------------------


def split_mixes(mixes: Tensor, scale: Tensor, base: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """3.1: mixes [L, (2 + hc) hc] -> pre, post [L, hc], comb [L, source, destination]."""
    hc, eps = config.hc_mult, config.hc_eps
    pre = torch.sigmoid(mixes[:, :hc] * scale[0] + base[:hc]) + eps
    post = 2 * torch.sigmoid(mixes[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    logits = (mixes[:, 2 * hc :] * scale[2] + base[2 * hc :]).unflatten(-1, (hc, hc))
    return pre, post, sinkhorn(logits, config.hc_sinkhorn_iters, eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """A nearly doubly stochastic matrix; the first row step is a softmax, the last step a column one."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """[L, hc, D], [L, hc] -> [L, D]."""
    return (pre[..., None] * streams.float()).sum(1).to(streams.dtype)


def expand(sublayer: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Stream j takes post[j] of the sublayer's output and comb[i, j] of every stream i."""
    mixed = torch.einsum("lij,lid->ljd", comb, streams.float())
    return (post[..., None] * sublayer.float()[:, None] + mixed).to(streams.dtype)


class HyperConnection:
    """Coefficients of one sublayer, from all streams at once."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: Config):
        self.config = config
        self.fn, self.base, self.scale = (checkpoint.vector(f"{prefix}_{name}") for name in ("fn", "base", "scale"))

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        flat = streams.flatten(1).float()
        norm = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return split_mixes(flat @ self.fn.T * norm, self.scale, self.base, self.config)


# ---- blocks ------------------------------------------------------------------------------------


class Engram:
    """3.9: adds what the table remembers of the last n-grams, gated per stream."""

    def __init__(self, checkpoint: Checkpoint, layer: int, config: Config, arithmetic: Arithmetic):
        self.prefix = f"layers.{layer}.engram"
        self.layer, self.config, self.checkpoint, self.arithmetic = layer, config, checkpoint, arithmetic
        self.constants = engram.hash_constants(config)[layer]
        self.wkv = checkpoint.linear(f"{self.prefix}.wkv")
        self.q_weight, self.k_weight = (checkpoint.vector(f"{self.prefix}.{n}_weight") for n in "qk")
        self.rotation = checkpoint.rotation()

    def inject(self, streams: Tensor, rows: Tensor, image: Tensor) -> Tensor:
        """streams [L, hc, D], rows [L, columns] table rows, image [L] bool -> streams."""
        values = self.checkpoint.table_rows(f"{self.prefix}.embed", rows.flatten()).to(self.arithmetic.dtype)
        kv = self.arithmetic.linear(values.view(len(rows), -1), self.wkv).unflatten(-1, (-1, streams.shape[-1]))
        key, value = kv[:, :-1], kv[:, -1]
        # keys are not rotated, so the streams they are compared with must not be either
        query = streams if self.rotation is None else streams.float() @ self.rotation.T
        gate = engram.gate(query, key, self.q_weight, self.k_weight, self.config.rms_norm_eps)
        gate = gate.masked_fill(image[:, None], 0.0)
        added: Tensor = streams.float() + gate[..., None] * value.float()[:, None]
        return added.to(streams.dtype)

    def __call__(self, streams: Tensor, step: Step) -> Tensor:
        rows = engram.hash_rows(step.state.compressed_ids, self.constants, step.engram_pad)[step.positions]
        step.tap(f"layer{self.layer}.engram_hash", rows)
        streams = self.inject(streams, rows.where(~step.image[:, None], 0), step.image)
        step.tap(f"layer{self.layer}.engram_stream", streams)
        return streams


class Block:
    """3.1: attention, then experts, each between a collapse and an expansion of the streams.

    The collapse uses the coefficients of the sublayer before (``pre``), which this one's successor
    receives in turn: that is what "delayed" means.
    """

    def __init__(self, checkpoint: Checkpoint, prefix: str, layer: int, config: Config, arithmetic: Arithmetic):
        trunk = layer < config.num_hidden_layers
        k = config.num_experts_per_tok if trunk else config.dspark_num_experts_per_tok
        self.layer, self.config = layer, config
        has_engram = trunk and layer in config.engram_layer_ids
        self.engram = Engram(checkpoint, layer, config, arithmetic) if has_engram else None
        self.attn = Attention(checkpoint, f"{prefix}.attn", layer, config, arithmetic)
        self.ffn = MoE(checkpoint, f"{prefix}.ffn", k, config, arithmetic)
        self.hc_attn = HyperConnection(checkpoint, f"{prefix}.hc_attn", config)
        self.hc_ffn = HyperConnection(checkpoint, f"{prefix}.hc_ffn", config)
        self.attn_norm, self.ffn_norm = (checkpoint.vector(f"{prefix}.{n}_norm.weight") for n in ("attn", "ffn"))

    def __call__(
        self, streams: Tensor, pre: Tensor, step: Step, attention: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """streams [L, hc, D], pre [L, hc] -> the same after this layer."""
        eps, name = self.config.rms_norm_eps, f"layer{self.layer}"
        next_pre, post, comb = self.hc_attn(streams)
        x = rms_norm(collapse(streams, pre), self.attn_norm, eps)
        y = attention(x) if attention else self.attn(x, step)
        step.tap(f"{name}.attn_in", x)
        step.tap(f"{name}.attn_out", y)
        streams, pre = expand(y, streams, post, comb), next_pre
        next_pre, post, comb = self.hc_ffn(streams)
        x = rms_norm(collapse(streams, pre), self.ffn_norm, eps)
        y = self.ffn(x, step)
        step.tap(f"{name}.ffn_in", x)
        step.tap(f"{name}.ffn_out", y)
        return expand(y, streams, post, comb), next_pre


@dataclass
class Output:
    """``logits`` [L, vocab] float32; ``main_hidden`` [L, targets * D] feeds the draft."""

    logits: Tensor
    main_hidden: Tensor


@dataclass
class Draft:
    """``tokens`` [block] greedy draft, ``logits`` [block, vocab], ``confidence`` [block] before sigmoid."""

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


class Model:
    """The trunk, the DSpark draft blocks and the vision tower of one checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: Config | None = None,
        grid: Grid = Grid.EXACT,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.checkpoint, self.config = checkpoint, config or Config.load(checkpoint.directory)
        c, self.dtype = self.config, dtype
        self.arithmetic = Arithmetic(grid, dtype)
        self.token_map = engram.load_token_map(checkpoint.directory)
        self.engram_pad = int(self.token_map[c.engram_pad_token_id])
        self.embed, self.head = checkpoint.vector("embed.weight"), checkpoint.vector("head.weight")
        self.norm = checkpoint.vector("norm.weight")
        self.layers = [Block(checkpoint, f"layers.{i}", i, c, self.arithmetic) for i in range(c.num_hidden_layers)]
        self.stages = [
            Block(checkpoint, f"mtp.{i}", c.num_hidden_layers + i, c, self.arithmetic)
            for i in range(c.num_nextn_predict_layers)
        ]
        self.vision = Vision(checkpoint, c, dtype)
        # 5.6: the draft works in the original basis; a rotated conversion has unrotated copies for it
        copies = ("mtp.0.embed.weight", f"mtp.{c.num_nextn_predict_layers - 1}.head.weight")
        self.draft_embed, self.draft_head = (
            checkpoint.vector(name) if name in checkpoint else shared
            for name, shared in zip(copies, (self.embed, self.head), strict=True)
        )

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """[L] -> [L, D]."""
        return self.embed[tokens].to(self.dtype)

    def merge_images(self, tokens: Tensor, token_types: Tensor, pictures: list[Tensor]) -> Tensor:
        """Embeddings [L, D] of a prompt whose image spans take the aligner's output."""
        start, newline, end = (self.checkpoint.vector(f"image_{n}") for n in ("start", "newline", "end"))
        return merge(self.embed_tokens(tokens), token_types, pictures, start, newline, end)

    def __call__(self, tokens: Tensor, state: State, embeddings: Tensor | None = None, tap: Tap = ignore) -> Output:
        """Append ``tokens`` [L] to the sequence. ``embeddings`` [L, D] replaces theirs (images)."""
        c = self.config
        image = tokens == c.image_token_id
        compressed = torch.where(image, engram.DEAD, self.token_map[tokens])
        state.compressed_ids = torch.cat((state.compressed_ids, compressed))
        step = Step(torch.arange(state.length, state.length + len(tokens)), state, tap, image, self.engram_pad)
        state.length += len(tokens)

        x = self.embed_tokens(tokens) if embeddings is None else embeddings
        streams, pre = self._spread(x)
        main_hidden = []
        for block in self.layers:
            if block.engram is not None:
                streams = block.engram(streams, step)
            if block.layer in c.dspark_target_layer_ids:  # the layer's input, after its Engram
                main_hidden.append(streams.mean(1))
            streams, pre = block(streams, pre, step)
            tap(f"layer{block.layer}.stream", streams)
            tap(f"layer{block.layer}.pre_mix", pre)
        hidden = rms_norm(collapse(streams, pre), self.norm, c.rms_norm_eps)
        empty = torch.zeros(len(tokens), 0, dtype=self.dtype)
        return Output(hidden.float() @ self.head.T, torch.cat(main_hidden, dim=-1) if main_hidden else empty)

    def _spread(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Every stream starts as the embedding; the first collapse reads stream 0 alone."""
        streams = x[:, None].repeat(1, self.config.hc_mult, 1)
        return streams, F.one_hot(torch.zeros(len(x), dtype=torch.long), self.config.hc_mult).float()

    # ---- 3.10: DSpark -------------------------------------------------------------------------

    def observe(self, main_hidden: Tensor, state: State) -> None:
        """Give the draft the trunk's view [L, targets * D] of the next L verified positions."""
        c = self.config
        main = self.arithmetic.linear(main_hidden, self.checkpoint.linear("mtp.0.main_proj"))
        main = rms_norm(main, self.checkpoint.vector("mtp.0.main_norm.weight"), c.rms_norm_eps)
        first = len(state.draft_window.get(0, ()))
        positions = torch.arange(first, first + len(main))
        for stage, block in enumerate(self.stages):
            _append(state.draft_window, stage, block.attn.window_rows(main, positions))

    def draft(self, anchor: int, state: State) -> Draft:
        """Draft a block after ``anchor``, the newest token, which the trunk has not seen yet."""
        c, last = self.config, f"mtp.{self.config.num_nextn_predict_layers - 1}"
        size = c.dspark_block_size
        tokens = torch.tensor([anchor] + [c.dspark_noise_token_id] * (size - 1))
        context = len(state.draft_window[0])
        image = torch.zeros(size, dtype=torch.bool)
        step = Step(torch.arange(context, context + size), state, ignore, image)
        streams, pre = self._spread(self.draft_embed[tokens].to(self.dtype))
        for stage, block in enumerate(self.stages):
            attn, window = block.attn, state.draft_window[stage][-c.sliding_window :]

            def attention(x: Tensor, attn: Attention = attn, window: Tensor = window) -> Tensor:
                # every token of the block sees the whole window and the whole block
                rows = torch.cat((window, attn.window_rows(x, step.positions)))
                q = attn.queries(x, step.positions)[1]
                visible = torch.ones(size, len(rows), dtype=torch.bool)
                return attn.output(attend(q, rows, visible, attn.sink, c.head_dim**-0.5), step.positions)

            streams, pre = block(streams, pre, step, attention)
        hidden = collapse(streams, pre)
        normed = rms_norm(hidden, self.checkpoint.vector(f"{last}.norm.weight"), c.rms_norm_eps)
        logits = normed.float() @ self.draft_head.T
        markov_embed = self.checkpoint.vector(f"{last}.markov_head.embed.weight")
        markov_head = self.checkpoint.vector(f"{last}.markov_head.head.weight")
        confidence_proj = self.checkpoint.vector(f"{last}.confidence_head.proj.weight")
        drafted, confidence, previous = [], [], anchor
        for i in range(size):  # each position is biased by the token drafted before it
            embedding = markov_embed[previous]
            logits[i] += embedding @ markov_head.T
            confidence.append(torch.cat((hidden[i].float(), embedding)) @ confidence_proj[0])
            previous = int(logits[i].argmax())
            drafted.append(previous)
        return Draft(torch.tensor(drafted), logits, torch.stack(confidence))
