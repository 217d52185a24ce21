"""The numbers of one model, read from the Hugging Face ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Rope:
    """One rotary table. ``factor`` 1 means no YaRN."""

    dim: int
    theta: float
    factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_positions: int = 0


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower; ``layers`` 0 means a text-only checkpoint."""

    layers: int
    hidden_size: int
    heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int


# What a model without candidates, Engram or draft blocks may leave out.
ABSENT: dict[str, Any] = {
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 1,
    "engram_layer_ids": (),
    "engram_num_embeddings": (),
    "engram_max_ngram_size": 1,
    "engram_vocab_size": 0,
    "engram_n_heads": 0,
    "engram_head_dim": 0,
    "engram_pad_token_id": 0,
    "engram_compressed_vocab_size": 1,
    "num_nextn_predict_layers": 0,
    "dspark_block_size": 0,
    "dspark_noise_token_id": 0,
    "dspark_target_layer_ids": (),
    "dspark_n_routed_experts": 0,
    "dspark_num_experts_per_tok": 0,
}


@dataclass(frozen=True)
class Config:
    """DeepSeek-V4.1 sizes, under the names of ``config.json``."""

    # trunk
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    # hyper-connections
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    # attention over a sliding window and over compressed positions
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    window_rope: Rope
    compressed_rope: Rope
    # mixture of experts
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    # Engram
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    # DSpark draft blocks
    num_nextn_predict_layers: int
    dspark_block_size: int
    dspark_noise_token_id: int
    dspark_target_layer_ids: tuple[int, ...]
    dspark_n_routed_experts: int
    dspark_num_experts_per_tok: int
    # images
    image_token_id: int
    vision: VisionConfig

    @classmethod
    def load(cls, directory: str | Path) -> Config:
        """Read ``directory/config.json``."""
        return cls.from_hf(json.loads((Path(directory) / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Config:
        """From the nested dictionary of ``config.json``. Raises KeyError for a missing number."""
        text, vision = config["text_config"], config.get("vision_config") or {"num_hidden_layers": 0}
        own: dict[str, Any] = {**ABSENT, **{name: text[name] for name in cls.__dataclass_fields__ if name in text}}
        scaling = text["rope_scaling"]
        own = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
        return cls(
            **own,
            window_rope=Rope(text["qk_rope_head_dim"], text["rope_theta"]),
            compressed_rope=Rope(
                text["qk_rope_head_dim"],
                text["compress_rope_theta"],
                scaling["factor"],
                scaling["beta_fast"],
                scaling["beta_slow"],
                scaling["original_max_position_embeddings"],
            ),
            image_token_id=config["image_token_id"],
            vision=VisionConfig(
                layers=vision["num_hidden_layers"],
                hidden_size=vision.get("hidden_size", 0),
                heads=vision.get("num_attention_heads", 1),
                intermediate_size=vision.get("intermediate_size", 0),
                patch_size=vision.get("patch_size", 14),
                rope_theta=vision.get("rope_theta", 10000.0),
                downsample_ratio=vision.get("downsample_ratio", 3),
            ),
        )

    def kv_source(self, layer: int) -> int:
        """The layer whose compressed rows ``layer`` attends to."""
        return max(source for source in self.kv_source_layer_ids if source <= layer)

    def index_source(self, layer: int) -> int:
        """The layer whose selection of compressed rows ``layer`` uses."""
        return max(source for source in self.index_source_layer_ids if source <= layer)
