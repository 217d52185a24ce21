"""Every size of a tiny checkpoint, and the presets."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Any

BLOCK = 32  # FP8 tile edge, FP4 / Engram group size


@dataclass
class Sizes:
    """Every size of the model. Names follow the official config where it has one.

    Constraints of the number formats and of the official code: the input width of every quantised
    linear must be a multiple of 32 (hidden_size, q_lora_rank, o_groups * o_lora_rank,
    num_attention_heads * head_dim / o_groups, moe_intermediate_size, engram columns * head_dim),
    and so must head_dim, index_head_dim and engram_head_dim. ``candidate_topk_blocks`` times
    ``candidate_block_size`` should be at least ``index_topk + candidate_block_size - 1``:
    otherwise a query can have fewer candidates than ``index_topk`` and the official top-k pads its
    result with arbitrary non-candidates.
    """

    seed: int = 20260910
    # text trunk
    vocab_size: int = 384
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    head_dim: int = 64
    qk_rope_head_dim: int = 16
    q_lora_rank: int = 64
    o_lora_rank: int = 32
    o_groups: int = 4
    sliding_window: int = 16
    compress_ratios: list[int] = field(default_factory=lambda: [0, 0, 2, 2, 2, 1, 1, 1])  # trunk only
    kv_source_layer_ids: list[int] = field(default_factory=lambda: [2, 5])
    index_source_layer_ids: list[int] = field(default_factory=lambda: [2, 5, 7])
    index_n_heads: int = 8
    index_head_dim: int = 32
    index_topk: int = 16
    candidate_source_layer_id: int = 5
    candidate_topk_blocks: int = 6
    candidate_block_size: int = 4
    moe_intermediate_size: int = 64
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-20
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    # positions
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_beta_fast: int = 32
    rope_beta_slow: int = 1
    original_max_position_embeddings: int = 64
    # Engram (num_embeddings and the compressed vocabulary are computed)
    engram_layer_ids: list[int] = field(default_factory=lambda: [1, 4])
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 4
    engram_head_dim: int = 64
    engram_vocab_size: int = 320
    engram_pad_token_id: int = 2
    # DSpark draft blocks
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_target_layer_ids: list[int] = field(default_factory=lambda: [5, 6, 7])
    dspark_markov_rank: int = 32
    dspark_n_routed_experts: int = 8
    dspark_num_experts_per_tok: int = 2
    # vision
    vision_num_hidden_layers: int = 2
    vision_hidden_size: int = 64
    vision_num_attention_heads: int = 4
    vision_intermediate_size: int = 176
    vision_patch_size: int = 14
    vision_rope_theta: float = 10000.0
    vision_downsample_ratio: int = 3
    vision_max_image_tokens: int = 64
    vision_min_pixels: int = 7056  # 84 x 84
    # statistics of the random weights (not part of the model configuration)
    logit_std: float = 3.5
    ffn_gain: float = 11.0
    attn_out_gain: float = 0.045
    moe_out_gain: float = 0.004
    engram_out_gain: float = 0.45
    raw_codes: bool = False  # draw FP4 / FP8 codes directly (fast, for large sizes)

    @property
    def hash_columns(self) -> int:
        """Engram table look-ups per token and layer."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def validate(self) -> None:
        """Fail early, with a sentence, on sizes the format or the official code cannot express."""

        def multiple(name: str, value: int) -> None:
            if value % BLOCK:
                raise ValueError(f"{name} = {value} must be a multiple of {BLOCK}")

        multiple("hidden_size", self.hidden_size)
        multiple("q_lora_rank", self.q_lora_rank)
        multiple("head_dim", self.head_dim)
        multiple("index_head_dim", self.index_head_dim)
        multiple("moe_intermediate_size", self.moe_intermediate_size)
        multiple("engram_head_dim", self.engram_head_dim)
        multiple("o_groups * o_lora_rank", self.o_groups * self.o_lora_rank)
        if self.num_attention_heads % self.o_groups:
            raise ValueError("num_attention_heads must be a multiple of o_groups")
        multiple("attention group width", self.num_attention_heads * self.head_dim // self.o_groups)
        if len(self.compress_ratios) != self.num_hidden_layers:
            raise ValueError("compress_ratios needs one entry per trunk layer")
        if self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim) or self.qk_rope_head_dim % 2:
            raise ValueError("qk_rope_head_dim must be even and fit into head_dim and index_head_dim")
        if not set(self.kv_source_layer_ids) <= set(self.index_source_layer_ids):
            raise ValueError("every KV source must be an index source")
        if self.candidate_source_layer_id >= 0:
            if self.candidate_source_layer_id not in self.kv_source_layer_ids:
                raise ValueError("the candidate source must be a KV source")
            reach = (self.candidate_topk_blocks - 1) * self.candidate_block_size + 1
            if reach < self.index_topk:
                print(
                    f"warning: only {reach} candidates are guaranteed for index_topk {self.index_topk}", file=sys.stderr
                )
        for layer in range(self.num_hidden_layers):
            ratio = self.compress_ratios[layer]
            source = max((s for s in self.kv_source_layer_ids if s <= layer), default=None)
            if ratio and (source is None or self.compress_ratios[source] != ratio):
                raise ValueError(f"layer {layer} has ratio {ratio} but no KV source of that ratio before it")
        if self.dspark_block_size and not self.dspark_target_layer_ids:
            raise ValueError("DSpark needs dspark_target_layer_ids")


PRESETS: dict[str, dict[str, Any]] = {
    # Small enough to live next to the tests.
    "a": {},
    # The released sizes per head, three KV sources, four sources of the index.
    "c": {
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "o_groups": 2,
        "compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [1, 3, 5],
        "index_source_layer_ids": [1, 3, 5, 7],
        "index_head_dim": 128,
        "candidate_block_size": 8,
        "dspark_target_layer_ids": [6, 7, 8],
    },
    # Different in every dimension, to catch hard-coded sizes.
    "b": {
        "seed": 77041,
        "vocab_size": 416,
        "hidden_size": 320,
        "num_hidden_layers": 10,
        "num_attention_heads": 6,
        "head_dim": 96,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 96,
        "o_lora_rank": 80,
        "o_groups": 2,
        "sliding_window": 32,
        "compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 1, 1],
        "kv_source_layer_ids": [1, 3, 5],
        "index_source_layer_ids": [1, 3, 5, 7, 8],
        "index_n_heads": 12,
        "index_head_dim": 64,
        "index_topk": 24,
        "candidate_source_layer_id": 5,
        "candidate_topk_blocks": 5,
        "candidate_block_size": 8,
        "moe_intermediate_size": 96,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 2.0,
        "swiglu_limit": 7.0,
        "hc_sinkhorn_iters": 12,
        "hc_eps": 1e-5,
        "max_position_embeddings": 768,
        "rope_theta": 5000.0,
        "compress_rope_theta": 80000.0,
        "rope_factor": 8.0,
        "rope_beta_fast": 16,
        "rope_beta_slow": 2,
        "original_max_position_embeddings": 96,
        "engram_layer_ids": [2, 7],
        "engram_max_ngram_size": 5,
        "engram_n_heads": 6,
        "engram_head_dim": 96,
        "engram_vocab_size": 157,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 4,
        "dspark_target_layer_ids": [4, 6, 9],
        "dspark_markov_rank": 48,
        "dspark_n_routed_experts": 6,
        "dspark_num_experts_per_tok": 3,
        "vision_num_hidden_layers": 3,
        "vision_hidden_size": 96,
        "vision_num_attention_heads": 3,
        "vision_intermediate_size": 224,
        "vision_patch_size": 14,
        "vision_rope_theta": 2000.0,
        "vision_downsample_ratio": 2,
        "vision_max_image_tokens": 40,
        "vision_min_pixels": 12544,
        "logit_std": 4.0,
        "ffn_gain": 9.0,
    },
    # Of the trained model that says things: training/train.py.
    "talk": {
        "vocab_size": 768,
        "hidden_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "head_dim": 96,
        "o_lora_rank": 48,
        "o_groups": 2,
        "sliding_window": 32,
        "compress_ratios": [0, 0, 2, 2, 1, 1],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 5],
        "index_n_heads": 4,
        "index_topk": 1024,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 512,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "hc_sinkhorn_iters": 4,
        "max_position_embeddings": 8192,
        "original_max_position_embeddings": 512,
        "engram_layer_ids": [1, 3],
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_vocab_size": 1500,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_n_routed_experts": 4,
    },
    # Wide layers in roughly the real proportions, for speed and memory tests of converters/servers.
    "bench": {
        "seed": 4041,
        "vocab_size": 8192,
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "head_dim": 256,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 256,
        "o_lora_rank": 256,
        "o_groups": 4,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 4, 6],
        "index_source_layer_ids": [2, 4, 6, 8, 10],
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 6,
        "candidate_topk_blocks": 512,
        "candidate_block_size": 8,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 32,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 1048576,
        "original_max_position_embeddings": 65536,
        "engram_layer_ids": [1, 4],
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_vocab_size": 42000,
        "dspark_target_layer_ids": [9, 10, 11],
        "dspark_markov_rank": 128,
        "dspark_n_routed_experts": 16,
        "dspark_num_experts_per_tok": 3,
        "vision_num_hidden_layers": 4,
        "vision_hidden_size": 512,
        "vision_num_attention_heads": 8,
        "vision_intermediate_size": 1408,
        "vision_max_image_tokens": 1024,
        "vision_min_pixels": 295936,
        "raw_codes": True,
    },
}


def engram_primes(sizes: Sizes) -> list[list[int]]:
    """Per Engram layer the bucket sizes, one unused prime per (n-gram order, head)."""

    def is_prime(value: int) -> bool:
        return value > 1 and all(value % d for d in range(2, math.isqrt(value) + 1))

    seen: set[int] = set()
    layers = []
    for _ in sizes.engram_layer_ids:
        primes: list[int] = []
        for _ in range(sizes.engram_max_ngram_size - 1):
            current = sizes.engram_vocab_size - 1  # every order starts its search here again
            for _ in range(sizes.engram_n_heads):
                current += 1
                while current in seen or not is_prime(current):
                    current += 1
                seen.add(current)
                primes.append(current)
        layers.append(primes)
    return layers
