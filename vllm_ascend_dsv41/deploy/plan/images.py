"""What pictures cost: the vision tower on each rank, one picture at work in it, and the cache of finished ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..recipe import Recipe

BF16 = 2


def tower_ranks(recipe: Recipe, vision: Mapping[str, Any], tensor: int) -> int:
    """Tensor-parallel ranks that the tower is divided among; 1: each has all of it, 0: it is not loaded."""
    limits = recipe.flag("limit-mm-per-prompt", {})
    limit = limits.get("image") if isinstance(limits, Mapping) else None
    none = limit == 0 or (isinstance(limit, Mapping) and limit.get("count") == 0)
    if not vision.get("num_hidden_layers") or recipe.flag("language-model-only") or none:
        return 0
    whole = recipe.flag("mm-encoder-tp-mode") == "data" or vision["num_attention_heads"] % tensor
    return 1 if whole else tensor


def picture_bytes(vision: Mapping[str, Any], hidden: int, budget: int, step: int) -> int:
    """What pictures add to a step whose activations are ``step`` bytes, estimated from shapes.

    vLLM's encoder cache, which holds as many tokens as a step or as the largest picture; and what that picture takes in
    the tower (residual, queries, keys and values, the MLP's inner part), which has ended when the step begins.
    """
    tokens = vision.get("max_image_tokens", 1024)  # vLLM's defaults
    patches = tokens * vision.get("downsample_ratio", 3) ** 2
    tower = patches * (5 * vision["hidden_size"] + 3 * vision["intermediate_size"]) * BF16
    return int(max(budget, tokens) * hidden * BF16 + max(tower - step, 0))
