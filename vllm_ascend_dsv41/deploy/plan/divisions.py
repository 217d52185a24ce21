"""Sizes that must divide one another: said by the plan, before a server refuses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..recipe import Recipe


def divisions(recipe: Recipe, text: Mapping[str, Any], engram: Mapping[str, Any]) -> Iterator[str]:
    """What cannot be divided: the server refuses it, too (``platform.refusals``)."""
    place = recipe.topology
    tensor, data = place.number("tensor_parallel_size"), place.number("data_parallel_size")
    columns = (text.get("engram_max_ngram_size", 1) - 1) * text.get("engram_n_heads", 0)
    if recipe.checkpoint != "ascend":
        return
    split = {
        "num_attention_heads": text["num_attention_heads"],
        "o_groups": text["o_groups"],
        "moe_intermediate_size": text["moe_intermediate_size"],
        "(hc_mult + 1) * hidden_size": (text["hc_mult"] + 1) * text["hidden_size"] if columns else 0,
        "the Engram hash columns": columns,
    }
    wrong = [f"{name} = {value}" for name, value in split.items() if value % tensor]
    if wrong:
        yield f"tensor_parallel_size {tensor} does not divide {', '.join(wrong)}; use 8, 4, 2 or 1"
    elif engram.get("embedding_across_dp") and columns % (tensor * place.number("data_parallel_size_local")):
        yield (
            f"{columns} Engram hash columns cannot be divided among {tensor} tensor-parallel ranks of "
            f"{place.number('data_parallel_size_local')} replicas; share one copy instead "
            "(dp_shared_memory), or choose another tensor_parallel_size"
        )
    if engram.get("embedding_across_dp") and recipe.device == "npu":
        yield "embedding_across_dp is not there on NPUs; use dp_shared_memory, one copy per node"
    if place.expert_parallel.value and text["n_routed_experts"] % (tensor * data):
        yield f"{text['n_routed_experts']} experts cannot be divided among {tensor * data} ranks"
    draft, block = recipe.draft_tokens, text.get("dspark_block_size", 1)
    if draft % block:
        yield f"num_speculative_tokens {draft}: drafts come in blocks of {block} (dspark_block_size); use {block}"
