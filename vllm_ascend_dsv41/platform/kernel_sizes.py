"""Sizes that the kernels of Atlas A2 and A3 were made for."""

from __future__ import annotations

from typing import Any


def outside(config: Any, ranks: int) -> list[str]:
    """Sizes of a model, divided among ``ranks`` tensor-parallel ranks, that vllm-ascend 0.30.0rc2's attention kernels
    refuse on A2 and A3 (its csrc: sparse_flash_mla, quant_lightning_indexer). Empty for the released model."""
    heads = config.num_attention_heads // ranks
    blocks = getattr(config, "candidate_topk_blocks", 0)
    taken = {
        f"head_dim {config.head_dim}, expected 512": config.head_dim == 512,
        f"sliding_window {config.sliding_window}, expected 128": config.sliding_window == 128,
        f"index_topk {config.index_topk}, expected 512 or 1024": config.index_topk in (512, 1024),
        f"index_n_heads {config.index_n_heads}, expected 32 or 64": config.index_n_heads in (32, 64),
        f"index_head_dim {config.index_head_dim}, expected 128": config.index_head_dim == 128,
        f"{heads} heads a rank, expected a power of two up to 128": 0 < heads <= 128 and heads & (heads - 1) == 0,
        f"candidate_topk_blocks {blocks}, expected a multiple of 64 up to 2048": blocks % 64 == 0 and blocks <= 2048,
    }
    return [found for found, good in taken.items() if not good]
