"""The tensors of one tiny checkpoint, shard by shard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from .formats import NamedRandom, quantize_fp4, quantize_fp8_rows, quantize_fp8_tiles
from .sizes import BLOCK, Sizes, engram_primes

Tensors = dict[str, torch.Tensor]
# RMSNorm weight means (standard deviation: 10 %), by last name component. Two layers get a much
# smaller attn_norm so that a wrong rms_norm_eps (1e-6 instead of 1e-20) changes the result.
NORM_MEAN = {"attn_norm": 0.025, "ffn_norm": 0.2, "q_norm": 0.97, "kv_norm": 0.4, "k_norm": 0.5, "compressor.norm": 0.3}
TINY_ATTN_NORM = 0.002


class Builder:
    """Creates the tensors of one checkpoint, shard by shard."""

    def __init__(self, sizes: Sizes, dry_run: bool = False) -> None:
        self.s = sizes
        self.random = NamedRandom(sizes.seed)
        self.dry_run = dry_run
        # A direction all embeddings share a little, as in trained models. The indexer's head
        # weights lean on it (so that most are positive); the head is orthogonal to it.
        self.common = self.random.normal("common_direction", sizes.hidden_size)
        self.muted_ids = [0, 2, sizes.vocab_size - 1]  # bos, pad, image placeholder (the last id)

    # -- formats -----------------------------------------------------------------------------------

    def _empty(self, out: Tensors, items: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        for name, (shape, dtype) in items.items():
            out[name] = torch.empty(shape, dtype=dtype, device="meta")

    def plain(
        self,
        out: Tensors,
        name: str,
        shape: tuple[int, ...],
        make: Callable[[], torch.Tensor],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """A tensor stored without scales."""
        if self.dry_run:
            self._empty(out, {name: (shape, dtype)})
            return
        value = make()
        assert tuple(value.shape) == shape, (name, value.shape, shape)
        out[name] = value.to(dtype).contiguous()

    def matrix(
        self, out: Tensors, name: str, rows: int, columns: int, gain: float = 1.0, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """A plain Gaussian matrix with standard deviation gain / sqrt(columns)."""
        self.plain(
            out, name, (rows, columns), lambda: self.random.normal(name, rows, columns) * (gain * columns**-0.5), dtype
        )

    def _around(self, name: str, shape: tuple[int, ...], mean: float | torch.Tensor, std: float) -> torch.Tensor:
        return mean + std * self.random.normal(name, *shape)

    def vector(
        self, out: Tensors, name: str, size: int, mean: float, std: float, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.plain(out, name, (size,), partial(self._around, name, (size,), mean, std), dtype)

    def norm(self, out: Tensors, name: str, size: int, mean: float | None = None) -> None:
        if mean is None:
            owner = name.removesuffix(".weight")
            mean = next((m for key, m in NORM_MEAN.items() if owner.endswith("." + key)), 1.0)
        self.vector(out, name, size, mean, 0.1 * mean)

    def _mute(self, weight: torch.Tensor) -> torch.Tensor:
        """Zero the output rows of ids that must never be generated (bos, pad, image placeholder)."""
        weight[self.muted_ids] = 0
        return weight

    def _texture(self, name: str, *shape: int) -> torch.Tensor:
        """Magnitudes 1/2, 1, 2 per scale group (RMS 1), so that neighbouring scales differ."""
        return torch.exp2(self.random.integers(name + "#texture", -1, 2, *shape).float()) / math.sqrt(1.75)

    def dense(
        self,
        out: Tensors,
        prefix: str,
        rows: int,
        columns: int,
        gain: float = 1.0,
        row_gain: torch.Tensor | None = None,
    ) -> None:
        """A dense FP8 linear: ``prefix.weight`` and ``prefix.scale``."""
        tiles = (-(-rows // BLOCK), columns // BLOCK)
        names = f"{prefix}.weight", f"{prefix}.scale"
        if self.dry_run:
            self._empty(
                out, {names[0]: ((rows, columns), torch.float8_e4m3fn), names[1]: (tiles, torch.float8_e8m0fnu)}
            )
            return
        weight = self.random.normal(names[0], rows, columns) * (gain * columns**-0.5)
        if row_gain is not None:
            weight *= row_gain.unsqueeze(1)
        texture = self._texture(names[0], *tiles).repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
        out[names[0]], out[names[1]] = quantize_fp8_tiles(weight * texture)

    def expert_linear(self, out: Tensors, prefix: str, rows: int, columns: int, gain: float) -> None:
        """A routed-expert linear: packed MXFP4 ``prefix.weight`` and ``prefix.scale``."""
        groups = (rows, columns // BLOCK)
        names = f"{prefix}.weight", f"{prefix}.scale"
        if self.dry_run:
            self._empty(out, {names[0]: ((rows, columns // 2), torch.int8), names[1]: (groups, torch.float8_e8m0fnu)})
            return
        if self.s.raw_codes:  # uniform codes have an RMS of about 3.2
            out[names[0]] = self.random.integers(names[0], 0, 256, rows, columns // 2).to(torch.uint8).view(torch.int8)
            exponent = round(math.log2(gain * columns**-0.5 / 3.2))
            jitter = self.random.integers(names[1], -1, 2, *groups).float()
            out[names[1]] = torch.exp2(exponent + jitter).to(torch.float8_e8m0fnu)
            return
        weight = self.random.normal(names[0], rows, columns) * (gain * columns**-0.5)
        texture = self._texture(names[0], *groups).repeat_interleave(BLOCK, 1)
        out[names[0]], out[names[1]] = quantize_fp4(weight * texture)

    # -- parts of the model ------------------------------------------------------------------------

    def attention(
        self, out: Tensors, p: str, attn_norm: float, ratio: int, kv_source: bool, index_source: bool
    ) -> None:
        s = self.s
        heads = s.num_attention_heads * s.head_dim
        self.dense(out, f"{p}.wq_a", s.q_lora_rank, s.hidden_size, 1.6)
        self.norm(out, f"{p}.q_norm.weight", s.q_lora_rank)
        self.dense(out, f"{p}.wq_b", heads, s.q_lora_rank, 3.0)
        self.dense(out, f"{p}.wkv", s.head_dim, s.hidden_size, 1.8)
        self.norm(out, f"{p}.kv_norm.weight", s.head_dim)
        self.dense(out, f"{p}.wo_a", s.o_groups * s.o_lora_rank, heads // s.o_groups, 1.6)
        self.dense(out, f"{p}.wo_b", s.hidden_size, s.o_groups * s.o_lora_rank, s.attn_out_gain)
        self.vector(out, f"{p}.attn_sink", s.num_attention_heads, 0.0, 1.0, torch.float32)
        if kv_source:
            self.matrix(out, f"{p}.compressor.wkv.weight", s.head_dim, s.hidden_size, 1.8)
            self.norm(out, f"{p}.compressor.norm.weight", s.head_dim)
            if ratio > 1:  # pooling logits with a standard deviation near 1.5
                self.matrix(out, f"{p}.compressor.wgate.weight", s.head_dim, s.hidden_size, 1.5 / attn_norm)
            self.matrix(out, f"{p}.indexer.wk.weight", s.index_head_dim, s.head_dim)
            self.norm(out, f"{p}.indexer.k_norm.weight", s.index_head_dim)
        if index_source:
            self.dense(out, f"{p}.indexer.wq_b", s.index_n_heads * s.index_head_dim, s.q_lora_rank, 2.0)
            name = f"{p}.indexer.weights_proj.weight"
            shape = (s.index_n_heads, s.hidden_size)
            gain = s.hidden_size**-0.5 / attn_norm
            self.plain(out, name, shape, lambda: (self.random.normal(name, *shape) + 0.5 * self.common) * gain)

    def moe(self, out: Tensors, p: str, experts: int) -> None:
        s = self.s
        self.matrix(out, f"{p}.gate.weight", experts, s.hidden_size, 1.5 / NORM_MEAN["ffn_norm"])
        self.vector(out, f"{p}.gate.bias", experts, 0.0, 0.15, torch.float32)
        self.vector(out, f"{p}.gate.bias_vl", experts, 0.0, 0.3, torch.float32)
        for e in range(experts):
            # every fourth expert is louder, so that its activations reach the SwiGLU clamp often
            gain = s.ffn_gain * (1.7 if e % 4 == 1 else 1.0)
            self.expert_linear(out, f"{p}.experts.{e}.w1", s.moe_intermediate_size, s.hidden_size, gain)
            self.expert_linear(out, f"{p}.experts.{e}.w2", s.hidden_size, s.moe_intermediate_size, s.moe_out_gain)
            self.expert_linear(out, f"{p}.experts.{e}.w3", s.moe_intermediate_size, s.hidden_size, gain)
        self.dense(out, f"{p}.shared_experts.w1", s.moe_intermediate_size, s.hidden_size, s.ffn_gain)
        self.dense(out, f"{p}.shared_experts.w2", s.hidden_size, s.moe_intermediate_size, 0.5 * s.moe_out_gain)
        self.dense(out, f"{p}.shared_experts.w3", s.moe_intermediate_size, s.hidden_size, s.ffn_gain)

    def hyper_connections(self, out: Tensors, p: str) -> None:
        s = self.s
        hc = s.hc_mult
        mix = (2 + hc) * hc
        base_mean = torch.cat([torch.full((hc,), -0.5), torch.zeros(hc), torch.eye(hc).flatten()])
        for part in ("attn", "ffn"):
            self.matrix(out, f"{p}.hc_{part}_fn", mix, hc * s.hidden_size, dtype=torch.float32)
            base, scale = f"{p}.hc_{part}_base", f"{p}.hc_{part}_scale"
            self.plain(out, base, (mix,), partial(self._around, base, (mix,), base_mean, 0.8), torch.float32)
            self.vector(out, scale, 3, 0.7, 0.1, torch.float32)

    def block(self, out: Tensors, p: str, layer: int) -> None:
        """A trunk layer (``layers.N``) or a DSpark block (``mtp.N``; layer >= num_hidden_layers)."""
        s = self.s
        trunk = layer < s.num_hidden_layers
        ratio = s.compress_ratios[layer] if trunk else 0
        tiny = trunk and layer in (s.engram_layer_ids[0] if s.engram_layer_ids else 1, *s.kv_source_layer_ids[:1])
        attn_norm = TINY_ATTN_NORM if tiny else NORM_MEAN["attn_norm"]
        self.norm(out, f"{p}.attn_norm.weight", s.hidden_size, attn_norm)
        self.norm(out, f"{p}.ffn_norm.weight", s.hidden_size)
        self.attention(
            out,
            f"{p}.attn",
            attn_norm,
            ratio,
            trunk and layer in s.kv_source_layer_ids,
            trunk and layer in s.index_source_layer_ids,
        )
        self.moe(out, f"{p}.ffn", s.n_routed_experts if trunk else s.dspark_n_routed_experts)
        self.hyper_connections(out, p)

    def engram(self, out: Tensors, layer: int, rows: int) -> None:
        s = self.s
        p = f"layers.{layer}.engram"
        weight, scale = f"{p}.embed.weight", f"{p}.embed.scale"
        groups = s.engram_head_dim // BLOCK
        if self.dry_run:
            self._empty(
                out,
                {
                    weight: ((rows, s.engram_head_dim), torch.float8_e4m3fn),
                    scale: ((rows, groups), torch.float8_e8m0fnu),
                },
            )
        else:
            table = self.random.normal(weight, rows, s.engram_head_dim).mul_(0.5)
            table.view(rows, groups, BLOCK).mul_(self._texture(weight, rows, groups).unsqueeze(-1))
            out[weight], out[scale] = quantize_fp8_rows(table)
        hc, dim = s.hc_mult, s.hidden_size
        gains = torch.cat([torch.ones(hc * dim), torch.full((dim,), s.engram_out_gain)])  # keys, then value
        self.dense(out, f"{p}.wkv", (hc + 1) * dim, s.hash_columns * s.engram_head_dim, 1.0, gains)
        for name in (f"{p}.q_weight", f"{p}.k_weight"):
            self.plain(out, name, (hc, dim), partial(self._around, name, (hc, dim), 1.3, 0.3))

    def vision(self, out: Tensors) -> None:
        s = self.s
        dim, inter = s.vision_hidden_size, s.vision_intermediate_size

        def linear(p: str, rows: int, columns: int, gain: float = 1.0, bias: bool = True) -> None:
            self.matrix(out, f"{p}.weight", rows, columns, gain)
            if bias:
                self.vector(out, f"{p}.bias", rows, 0.0, 0.05)

        linear("vision.patch_embed.proj", dim, 3 * s.vision_patch_size**2)
        for i in range(s.vision_num_hidden_layers):
            p = f"vision.blocks.{i}"
            self.norm(out, f"{p}.norm1.weight", dim, 1.0)
            linear(f"{p}.attn.wqkv", 3 * dim, dim, 1.5)
            linear(f"{p}.attn.wo", dim, dim)
            self.norm(out, f"{p}.norm2.weight", dim, 1.0)
            linear(f"{p}.mlp.w1", 2 * inter, dim, bias=False)
            linear(f"{p}.mlp.w2", dim, inter, bias=False)
        self.norm(out, "vision.norm.weight", dim, 1.0)
        linear("aligner.w1", s.hidden_size, dim * s.vision_downsample_ratio**2, 1.5)
        linear("aligner.w2", s.hidden_size, s.hidden_size, 0.15)

    # -- shards ------------------------------------------------------------------------------------

    def shards(self) -> Iterator[Callable[[], Tensors]]:
        """One function per shard file, in file order."""
        s = self.s

        def vision() -> Tensors:
            out: Tensors = {}
            self.vision(out)
            return out

        def embeddings() -> Tensors:
            out: Tensors = {}
            shape = (s.vocab_size, s.hidden_size)
            self.plain(
                out,
                "embed.weight",
                shape,
                lambda: 0.12 * (self.random.normal("embed.weight", *shape) + 0.6 * self.common) / math.sqrt(1.36),
            )
            if s.vision_num_hidden_layers:
                for part in ("start", "newline", "end"):
                    self.vector(out, f"image_{part}", s.hidden_size, 0.0, 0.12)
            return out

        def layer(index: int) -> Tensors:
            out: Tensors = {}
            self.block(out, f"layers.{index}", index)
            return out

        def head() -> Tensors:
            out: Tensors = {}

            def make() -> torch.Tensor:
                weight = self.random.normal("head.weight", s.vocab_size, s.hidden_size)
                axis = self.common / self.common.norm()
                weight -= (weight @ axis).unsqueeze(1) * axis
                return self._mute(weight * (s.logit_std * s.hidden_size**-0.5))

            self.plain(out, "head.weight", (s.vocab_size, s.hidden_size), make)
            self.norm(out, "norm.weight", s.hidden_size, 1.0)
            return out

        def mtp(index: int) -> Tensors:
            out: Tensors = {}
            p = f"mtp.{index}"
            self.block(out, p, s.num_hidden_layers + index)
            if index == 0:
                self.dense(out, f"{p}.main_proj", s.hidden_size, s.hidden_size * len(s.dspark_target_layer_ids))
                self.norm(out, f"{p}.main_norm.weight", s.hidden_size, 1.0)
            if index == s.num_nextn_predict_layers - 1:
                self.norm(out, f"{p}.norm.weight", s.hidden_size, 1.0)
                rank = s.dspark_markov_rank
                self.matrix(out, f"{p}.markov_head.embed.weight", s.vocab_size, rank, 0.5 * rank**0.5)
                name, shape = f"{p}.markov_head.head.weight", (s.vocab_size, rank)
                gain = 0.8 * s.logit_std * rank**-0.5
                self.plain(out, name, shape, lambda: self._mute(self.random.normal(name, *shape) * gain))
                self.matrix(out, f"{p}.confidence_head.proj.weight", 1, s.hidden_size + rank, 3.0)
            return out

        def engram(index: int) -> Tensors:
            out: Tensors = {}
            self.engram(out, s.engram_layer_ids[index], sum(engram_primes(s)[index]))
            return out

        if s.vision_num_hidden_layers:
            yield vision
        yield embeddings
        for i in range(s.num_hidden_layers):
            yield partial(layer, i)
        yield head
        for i in range(s.num_nextn_predict_layers):
            yield partial(mtp, i)
        for i in range(len(s.engram_layer_ids)):
            yield partial(engram, i)
