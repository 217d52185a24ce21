"""Every tensor of a DeepSeek-V4.1 checkpoint, in the official layout and in the Ascend layout.

Derived from the config alone; applied to the released sizes it yields the published inventory
(96,085 tensors, 510,286,023,000 bytes) and the tensor counts of the W8A8 release (spec section 5.3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..layer_plan import ConfigError, LayerPlan, ModelPlan

DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "I64": 8}
GROUP = 32  # FP8 tile edge; FP4 and Engram scale group


class Kind(Enum):
    """What a tensor is: decides its form in either layout."""

    EXPERT = "routed expert: MXFP4 -> INT8"
    LINEAR = "dense linear: FP8 tiles -> INT8"
    FLOAT_LINEAR = "dense linear kept in floating point: FP8 tiles -> BF16"
    BF16 = "BF16 -> BF16"
    WIDENED = "BF16 -> F32"
    F32 = "F32 -> F32"
    TABLE = "Engram table: FP8 rows -> INT8 rows"


class Weights(Enum):
    """Target of a conversion."""

    W8A8 = "w8a8"
    BF16 = "bf16"


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its key, its safetensors dtype and its shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of its data."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model: ``name`` is its key in both layouts, ``shape`` its logical shape."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def base(self) -> str:
        """``name`` without its last component: the prefix of its scales."""
        return self.name.rpartition(".")[0]

    @property
    def quantized(self) -> bool:
        """Becomes INT8 with one scale per output row."""
        return self.kind in (Kind.EXPERT, Kind.LINEAR)

    def official(self) -> tuple[Stored, ...]:
        """Its tensors in the official layout (spec section 2)."""
        scale = f"{self.base}.scale"
        if self.kind is Kind.EXPERT:
            rows, columns = self.shape
            packed = Stored(self.name, "I8", (rows, columns // 2))
            return packed, Stored(scale, "F8_E8M0", (rows, columns // GROUP))
        if self.kind in (Kind.LINEAR, Kind.FLOAT_LINEAR):
            rows, columns = self.shape
            tiles = (-(-rows // GROUP), -(-columns // GROUP))
            return Stored(self.name, "F8_E4M3", self.shape), Stored(scale, "F8_E8M0", tiles)
        if self.kind is Kind.TABLE:
            rows, columns = self.shape
            return Stored(self.name, "F8_E4M3", self.shape), Stored(scale, "F8_E8M0", (rows, columns // GROUP))
        return (Stored(self.name, "F32" if self.kind is Kind.F32 else "BF16", self.shape),)

    def ascend(self, weights: Weights) -> tuple[Stored, ...]:
        """Its tensors in the Ascend layout (spec sections 5.2 to 5.4)."""
        if self.kind in (Kind.F32, Kind.WIDENED):
            return (Stored(self.name, "F32", self.shape),)
        if weights is Weights.W8A8 and self.quantized:
            column = (self.shape[0], 1)
            scales = (Stored(f"{self.name}_{suffix}", "F32", column) for suffix in ("scale", "offset"))
            return Stored(self.name, "I8", self.shape), *scales
        if weights is Weights.W8A8 and self.kind is Kind.TABLE:
            rows, columns = self.shape
            return Stored(self.name, "I8", self.shape), Stored(f"{self.base}.scale", "F32", (rows, columns // GROUP))
        return (Stored(self.name, "BF16", self.shape),)


@dataclass(frozen=True)
class TensorCopy:
    """A tensor of the Ascend layout that repeats another: the draft's own embedding and head."""

    name: str
    source: str


def draft_copies(config: Mapping[str, Any]) -> tuple[TensorCopy, ...]:
    """Unrotated copies for the draft (spec section 5.3); equal to the trunk's, which are not rotated."""
    stages = config["text_config"].get("num_nextn_predict_layers", 0)
    if not stages:
        return ()
    return TensorCopy("mtp.0.embed.weight", "embed.weight"), TensorCopy(f"mtp.{stages - 1}.head.weight", "head.weight")


def inventory(config: Mapping[str, Any]) -> list[TensorSpec]:
    """All tensors, in the order of the official shards. Raises ConfigError for an illegal config."""
    return list(_Inventory(config).tensors())


class _Inventory:
    def __init__(self, config: Mapping[str, Any]) -> None:
        self.text: Mapping[str, Any] = config["text_config"]
        self.vision: Mapping[str, Any] = config.get("vision_config") or {}
        self.plan = ModelPlan.from_config(config)
        grouped = ["hidden_size", "moe_intermediate_size"]
        grouped += ["engram_head_dim"] if any(layer.engram is not None for layer in self.plan.trunk) else []
        for name in grouped:
            if self.text[name] % GROUP:
                raise ConfigError(
                    f"config.json: {name} = {self.text[name]}, expected a multiple of {GROUP} (scale groups)"
                )

    def tensors(self) -> Iterator[TensorSpec]:
        t = self.text
        hidden, vocab = t["hidden_size"], t["vocab_size"]
        if self.vision.get("num_hidden_layers"):
            yield from self._vision(hidden)
        yield TensorSpec("embed.weight", Kind.BF16, (vocab, hidden))
        if self.vision.get("num_hidden_layers"):
            for part in ("start", "newline", "end"):
                yield TensorSpec(f"image_{part}", Kind.BF16, (hidden,))
        for layer in self.plan.trunk:
            yield from self._block(f"layers.{layer.index}", layer)
        yield TensorSpec("head.weight", Kind.WIDENED, (vocab, hidden))
        yield TensorSpec("norm.weight", Kind.WIDENED, (hidden,))
        for stage, layer in enumerate(self.plan.draft):
            yield from self._block(f"mtp.{stage}", layer)
            yield from self._draft(stage, hidden, vocab)
        for layer in self.plan.trunk:
            if layer.engram is not None:
                yield from self._engram(layer.index, layer.engram, hidden)

    def _block(self, p: str, layer: LayerPlan) -> Iterator[TensorSpec]:
        t = self.text
        hidden, hc = t["hidden_size"], t["hc_mult"]
        mix = (2 + hc) * hc
        for norm in ("attn_norm", "ffn_norm"):
            yield TensorSpec(f"{p}.{norm}.weight", Kind.WIDENED, (hidden,))
        for part in ("attn", "ffn"):
            yield TensorSpec(f"{p}.hc_{part}_fn", Kind.F32, (mix, hc * hidden))
            yield TensorSpec(f"{p}.hc_{part}_base", Kind.F32, (mix,))
            yield TensorSpec(f"{p}.hc_{part}_scale", Kind.F32, (3,))
        yield from self._attention(f"{p}.attn", layer)
        yield from self._moe(f"{p}.ffn", layer)

    def _attention(self, p: str, layer: LayerPlan) -> Iterator[TensorSpec]:
        t = self.text
        hidden, head, rank = t["hidden_size"], t["head_dim"], t["q_lora_rank"]
        heads, low = t["num_attention_heads"] * head, t["o_groups"] * t["o_lora_rank"]
        yield TensorSpec(f"{p}.wq_a.weight", Kind.LINEAR, (rank, hidden))
        yield TensorSpec(f"{p}.q_norm.weight", Kind.WIDENED, (rank,))
        yield TensorSpec(f"{p}.wq_b.weight", Kind.LINEAR, (heads, rank))
        yield TensorSpec(f"{p}.wkv.weight", Kind.LINEAR, (head, hidden))
        yield TensorSpec(f"{p}.kv_norm.weight", Kind.WIDENED, (head,))
        yield TensorSpec(f"{p}.wo_a.weight", Kind.FLOAT_LINEAR, (low, heads // t["o_groups"]))
        yield TensorSpec(f"{p}.wo_b.weight", Kind.FLOAT_LINEAR, (hidden, low))
        yield TensorSpec(f"{p}.attn_sink", Kind.F32, (t["num_attention_heads"],))
        if layer.is_kv_source:
            # ratio 1 is an ordinary projection; pooling two tokens is done in float32 throughout
            kind = Kind.WIDENED if layer.ratio > 1 else Kind.BF16
            yield TensorSpec(f"{p}.compressor.wkv.weight", kind, (head, hidden))
            if layer.ratio > 1:
                yield TensorSpec(f"{p}.compressor.wgate.weight", Kind.WIDENED, (head, hidden))
            yield TensorSpec(f"{p}.compressor.norm.weight", Kind.WIDENED, (head,))
            yield TensorSpec(f"{p}.indexer.wk.weight", Kind.BF16, (t["index_head_dim"], head))
            yield TensorSpec(f"{p}.indexer.k_norm.weight", Kind.WIDENED, (t["index_head_dim"],))
        if layer.is_index_source:
            width = t["index_n_heads"] * t["index_head_dim"]
            yield TensorSpec(f"{p}.indexer.wq_b.weight", Kind.LINEAR, (width, rank))
            yield TensorSpec(f"{p}.indexer.weights_proj.weight", Kind.BF16, (t["index_n_heads"], hidden))

    def _moe(self, p: str, layer: LayerPlan) -> Iterator[TensorSpec]:
        hidden, inner = self.text["hidden_size"], self.text["moe_intermediate_size"]
        yield TensorSpec(f"{p}.gate.weight", Kind.BF16, (layer.experts, hidden))
        yield TensorSpec(f"{p}.gate.bias", Kind.F32, (layer.experts,))
        yield TensorSpec(f"{p}.gate.bias_vl", Kind.F32, (layer.experts,))
        shapes = (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden)))
        for expert in range(layer.experts):
            for name, shape in shapes:
                yield TensorSpec(f"{p}.experts.{expert}.{name}.weight", Kind.EXPERT, shape)
        for name, shape in shapes:
            yield TensorSpec(f"{p}.shared_experts.{name}.weight", Kind.LINEAR, shape)

    def _draft(self, stage: int, hidden: int, vocab: int) -> Iterator[TensorSpec]:
        t, p = self.text, f"mtp.{stage}"
        if stage == 0:
            targets = len(t["dspark_target_layer_ids"])
            yield TensorSpec(f"{p}.main_proj.weight", Kind.FLOAT_LINEAR, (hidden, targets * hidden))
            yield TensorSpec(f"{p}.main_norm.weight", Kind.WIDENED, (hidden,))
        if stage == len(self.plan.draft) - 1:
            rank = t["dspark_markov_rank"]
            yield TensorSpec(f"{p}.norm.weight", Kind.WIDENED, (hidden,))
            yield TensorSpec(f"{p}.markov_head.embed.weight", Kind.BF16, (vocab, rank))
            yield TensorSpec(f"{p}.markov_head.head.weight", Kind.BF16, (vocab, rank))
            yield TensorSpec(f"{p}.confidence_head.proj.weight", Kind.BF16, (1, hidden + rank))

    def _engram(self, layer: int, index: int, hidden: int) -> Iterator[TensorSpec]:
        t, p = self.text, f"layers.{layer}.engram"
        dim, hc = t["engram_head_dim"], t["hc_mult"]
        columns = (t["engram_max_ngram_size"] - 1) * t["engram_n_heads"]
        yield TensorSpec(f"{p}.embed.weight", Kind.TABLE, (t["engram_num_embeddings"][index], dim))
        yield TensorSpec(f"{p}.wkv.weight", Kind.FLOAT_LINEAR, ((hc + 1) * hidden, columns * dim))
        for name in ("q_weight", "k_weight"):
            yield TensorSpec(f"{p}.{name}", Kind.BF16, (hc, hidden))

    def _vision(self, hidden: int) -> Iterator[TensorSpec]:
        v = self.vision
        dim, inner = v["hidden_size"], v["intermediate_size"]

        def linear(p: str, rows: int, columns: int, bias: bool = True) -> Iterator[TensorSpec]:
            yield TensorSpec(f"{p}.weight", Kind.BF16, (rows, columns))
            if bias:
                yield TensorSpec(f"{p}.bias", Kind.BF16, (rows,))

        yield from linear("vision.patch_embed.proj", dim, 3 * v["patch_size"] ** 2)
        for block in range(v["num_hidden_layers"]):
            p = f"vision.blocks.{block}"
            yield TensorSpec(f"{p}.norm1.weight", Kind.BF16, (dim,))
            yield from linear(f"{p}.attn.wqkv", 3 * dim, dim)
            yield from linear(f"{p}.attn.wo", dim, dim)
            yield TensorSpec(f"{p}.norm2.weight", Kind.BF16, (dim,))
            yield from linear(f"{p}.mlp.w1", 2 * inner, dim, bias=False)
            yield from linear(f"{p}.mlp.w2", dim, inner, bias=False)
        yield TensorSpec("vision.norm.weight", Kind.BF16, (dim,))
        yield from linear("aligner.w1", hidden, dim * v["downsample_ratio"] ** 2)
        yield from linear("aligner.w2", hidden, hidden)
