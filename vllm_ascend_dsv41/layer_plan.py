"""What each layer owns and reads, derived from the config and validated.

Everybody who needs the topology of a checkpoint (model, cache, converter, memory plan) asks here,
so that an illegal config is refused once, with the field and its value, before anything is built.
Topology: spec section 3.3 to 3.6 and 3.9; DeepSeek-V4.1 technical report, compressed sparse attention 2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

MOST_LAYERS, MOST_EXPERTS = 10_000, 100_000  # beyond these a number is a mistake, and would be expanded into a list


class ConfigError(ValueError):
    """An illegal model config; the message names the field, its value and what is allowed."""


class CandidateRole(Enum):
    """The part a layer's indexer plays in the two-stage selection."""

    NONE = "none"
    SOURCE = "source"  # scores blocks of rows and publishes the best
    CONSUMER = "consumer"  # selects among the published blocks only


@dataclass(frozen=True)
class LayerPlan:
    """One trunk layer (or draft stage) as the cache and the model see it."""

    index: int
    ratio: int  # tokens per compressed row; 0: sliding window only
    kv_source: int | None  # layer whose compressed rows are read
    index_source: int | None  # layer whose selection is used
    candidate_role: CandidateRole
    engram: int | None  # position in engram_layer_ids
    draft_target: bool  # its input feeds the draft
    experts: int
    experts_per_token: int

    @property
    def is_kv_source(self) -> bool:
        """Owns a compressor, compressed rows and index keys."""
        return self.kv_source == self.index

    @property
    def is_index_source(self) -> bool:
        """Owns an indexer."""
        return self.index_source == self.index

    @property
    def has_open_group(self) -> bool:
        """Keeps the inputs of an incomplete group between steps."""
        return self.is_kv_source and self.ratio > 1


@dataclass(frozen=True)
class ModelPlan:
    """All layers: ``trunk``, then the ``draft`` stages."""

    trunk: tuple[LayerPlan, ...]
    draft: tuple[LayerPlan, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelPlan:
        """From ``config.json`` or its ``text_config`` alone. Raises ConfigError."""
        if "text_config" not in config:
            return _Builder(config).build()
        text = config["text_config"]
        if not isinstance(text, Mapping):
            raise ConfigError(f"config.json: text_config = {text!r}, expected an object")
        plan = _Builder(text).build()
        _Builder(config).integer("image_token_id", 0)
        vision = config.get("vision_config")
        if vision is not None:
            if not isinstance(vision, Mapping):
                raise ConfigError(f"config.json: vision_config = {vision!r}, expected an object")
            _Builder(vision, "vision_config.").vision()
        return plan


class _Builder:
    def __init__(self, config: Mapping[str, Any], where: str = "") -> None:
        self.config, self.where = config, where

    # ---- reading --------------------------------------------------------------------------------

    def refuse(self, name: str, expected: str) -> ConfigError:
        found = f"= {self.config[name]!r}" if name in self.config else "is missing"
        return ConfigError(f"config.json: {self.where}{name} {found}, expected {expected}")

    def integer(self, name: str, low: int, high: int | None = None) -> int:
        value = self.config.get(name)
        allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
            raise self.refuse(name, allowed)
        return value

    def number(self, name: str, low: float, high: float = math.inf) -> float:
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            allowed = f"a number >= {low}" if high == math.inf else f"a number from {low} to {high}"
            raise self.refuse(name, allowed)
        if not abs(value) < sys.float_info.max:  # also integers that no float holds
            raise self.refuse(name, "a finite number")
        return float(value)

    def fixed(self, name: str, value: Any) -> None:
        """What the model is only written for; absent means that value."""
        if self.config.get(name, value) != value:
            raise self.refuse(name, repr(value))

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.config.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.refuse(name, "a list of integers")
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            raise self.refuse(name, "a list of integers")
        return tuple(value)

    def layer_ids(self, name: str, layers: int) -> tuple[int, ...]:
        ids = self.integers(name)
        if any(not 0 <= layer < layers for layer in ids):
            raise self.refuse(name, f"layers between 0 and {layers - 1}")
        if list(ids) != sorted(set(ids)):
            raise self.refuse(name, "ascending layers without repetition")
        return ids

    # ---- rules ----------------------------------------------------------------------------------

    def sizes(self) -> None:
        self.integer("vocab_size", 1)
        self.integer("hidden_size", 1)
        heads = self.integer("num_attention_heads", 1)
        groups = self.integer("o_groups", 1)
        if heads % groups:
            raise self.refuse("o_groups", f"a divisor of num_attention_heads = {heads}")
        head_dim = self.integer("head_dim", 2)
        rope = self.integer("qk_rope_head_dim", 2, head_dim)
        if rope % 2:
            raise self.refuse("qk_rope_head_dim", "an even number")
        for name in (
            "q_lora_rank",
            "o_lora_rank",
            "sliding_window",
            "moe_intermediate_size",
            "max_position_embeddings",
        ):
            self.integer(name, 1)
        self.integer("hc_mult", 1, 64)
        self.integer("hc_sinkhorn_iters", 1, 1000)
        for name in ("rms_norm_eps", "hc_eps", "swiglu_limit", "routed_scaling_factor"):
            self.number(name, 0.0)
        for name in ("rope_theta", "compress_rope_theta"):
            self.number(name, 1.0)
        self.rope_scaling()
        only = {
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "n_shared_experts": 1,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "tie_word_embeddings": False,
        }
        for name, value in only.items():
            self.fixed(name, value)

    def rope_scaling(self) -> None:
        scaling = self.config.get("rope_scaling")
        if not isinstance(scaling, Mapping):
            raise self.refuse("rope_scaling", "an object with YaRN's numbers")
        own = _Builder(scaling, "rope_scaling.")
        own.number("factor", 1.0)
        own.number("beta_fast", 1e-3)
        own.number("beta_slow", 1e-3)
        own.integer("original_max_position_embeddings", 1)

    def vision(self) -> None:
        """The vision tower; ``num_hidden_layers`` 0 means there is none."""
        if not self.integer("num_hidden_layers", 0, MOST_LAYERS):
            return
        for name in ("hidden_size", "num_attention_heads", "intermediate_size", "patch_size", "downsample_ratio"):
            self.integer(name, 1)
        if self.config["hidden_size"] % (4 * self.config["num_attention_heads"]):
            raise self.refuse("hidden_size", "a multiple of four times num_attention_heads")
        self.number("rope_theta", 1.0)

    def sources(self, layers: int, ratios: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        kv = self.layer_ids("kv_source_layer_ids", layers)
        index = self.layer_ids("index_source_layer_ids", layers)
        for layer in kv:
            if not ratios[layer]:
                raise self.refuse("kv_source_layer_ids", f"layers with a compress_ratio; layer {layer} has 0")
        if not set(kv) <= set(index):
            raise self.refuse("index_source_layer_ids", f"every KV source {list(kv)} among them")
        for layer in index:
            if not ratios[layer]:
                raise self.refuse("index_source_layer_ids", f"layers with a compress_ratio; layer {layer} has 0")
        for layer in range(layers):
            source = max((s for s in kv if s <= layer), default=None)
            if ratios[layer] and source is None:
                raise self.refuse("kv_source_layer_ids", f"a source at or before layer {layer}, which reads one")
            if ratios[layer] and source is not None and ratios[source] != ratios[layer]:
                raise self.refuse(
                    "compress_ratios",
                    f"ratio {ratios[source]} at layer {layer}, as its KV source {source} has",
                )
        if index:
            self.integer("index_n_heads", 1)
            self.integer("index_head_dim", int(self.config["qk_rope_head_dim"]))
            self.integer("index_topk", 1)
        return kv, index

    def candidates(self, kv: tuple[int, ...], index: tuple[int, ...]) -> int:
        source = self.config.get("candidate_source_layer_id", -1)
        if source is None or source == -1:
            return -1
        if source not in index:
            raise self.refuse("candidate_source_layer_id", f"-1 or one of index_source_layer_ids {list(index)}")
        self.integer("candidate_topk_blocks", 1)
        self.integer("candidate_block_size", 1)
        for layer in index:
            if layer > source and any(source < s <= layer for s in kv):
                raise self.refuse(
                    "candidate_source_layer_id", f"a source whose rows index source {layer} also reads, not older ones"
                )
        return int(source)

    def engram(self, layers: int) -> tuple[int, ...]:
        ids = self.layer_ids("engram_layer_ids", layers) if self.config.get("engram_layer_ids") else ()
        if not ids:
            return ids
        rows = self.integers("engram_num_embeddings")
        if len(rows) != len(ids) or min(rows) < 1:
            raise self.refuse("engram_num_embeddings", f"{len(ids)} positive numbers, one per engram_layer_ids")
        self.integer("engram_max_ngram_size", 2)
        for name in ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size"):
            self.integer(name, 1)
        self.integer("engram_pad_token_id", 0, int(self.config["vocab_size"]) - 1)
        return ids

    def experts(self, count: str, chosen: str) -> tuple[int, int]:
        total = self.integer(count, 1, MOST_EXPERTS)
        return total, self.integer(chosen, 1, total)

    # ---- result ---------------------------------------------------------------------------------

    def build(self) -> ModelPlan:
        self.sizes()
        layers = self.integer("num_hidden_layers", 1, MOST_LAYERS)
        stages = 0
        if "num_nextn_predict_layers" in self.config:
            stages = self.integer("num_nextn_predict_layers", 0, MOST_LAYERS)
        ratios = self.integers("compress_ratios")
        if len(ratios) not in (layers, layers + stages):
            with_draft = f", or {layers + stages} with the draft stages" if stages else ""
            raise self.refuse("compress_ratios", f"{layers} entries{with_draft}")
        if any(ratio not in (0, 1, 2) for ratio in ratios):
            raise self.refuse("compress_ratios", "0, 1 or 2 for every layer")
        if any(ratios[layers:]):
            raise self.refuse("compress_ratios", "0 for the draft stages at the end")
        kv, index = self.sources(layers, ratios)
        candidate = self.candidates(kv, index)
        engram = self.engram(layers)
        experts, chosen = self.experts("n_routed_experts", "num_experts_per_tok")
        targets: tuple[int, ...] = ()
        draft: list[LayerPlan] = []
        if stages:
            targets = self.layer_ids("dspark_target_layer_ids", layers)
            if not targets:
                raise self.refuse("dspark_target_layer_ids", "at least one layer for the draft stages to read")
            self.integer("dspark_block_size", 1)
            self.integer("dspark_markov_rank", 1)
            self.integer("dspark_noise_token_id", 0, int(self.config["vocab_size"]) - 1)
            counts = self.experts("dspark_n_routed_experts", "dspark_num_experts_per_tok")
            draft = [
                LayerPlan(layers + stage, 0, None, None, CandidateRole.NONE, None, False, *counts)
                for stage in range(stages)
            ]

        def role(layer: int) -> CandidateRole:
            if candidate < 0 or layer not in index or layer < candidate:
                return CandidateRole.NONE
            return CandidateRole.SOURCE if layer == candidate else CandidateRole.CONSUMER

        trunk = [
            LayerPlan(
                index=layer,
                ratio=ratios[layer],
                kv_source=max(s for s in kv if s <= layer) if ratios[layer] else None,
                index_source=max(s for s in index if s <= layer) if ratios[layer] else None,
                candidate_role=role(layer),
                engram=engram.index(layer) if layer in engram else None,
                draft_target=layer in targets,
                experts=experts,
                experts_per_token=chosen,
            )
            for layer in range(layers)
        ]
        return ModelPlan(tuple(trunk), tuple(draft))
