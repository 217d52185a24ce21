"""An estimate of the largest sum of intermediate tensors of a step, from their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

UNEVEN = 2  # tokens that a rank's experts get, beside an even share
BF16, F32 = 2, 4


@dataclass(frozen=True)
class Activations:
    """Bytes of the largest step, and of what it consists."""

    peak: int
    streams: int
    attention: int
    experts: int
    engram: int
    logits: int
    basis: str


def activations(
    text: Mapping[str, Any], hardware: str, tokens: int, seqs: int, draft: int, tensor: int, data: int, expert: bool
) -> Activations:
    """Of a step of ``tokens`` tokens per data-parallel rank: the residual streams are there all the time, and beside
    them the largest of a layer's parts; at its end the logits of ``seqs`` requests with ``draft`` drafts each.

    Experts: without expert parallelism a rank's tokens; with it A2 gathers the tokens of all ranks, A3 exchanges them.
    """
    hidden, streams_count = text["hidden_size"], text["hc_mult"]
    targets = len(text.get("dspark_target_layer_ids", ())) if draft else 0
    # streams in and out, the collapsed input in both widths, the draft's view of target layers
    streams = tokens * hidden * (2 * streams_count * BF16 + BF16 + F32 + 2 * targets * BF16)
    heads = text["num_attention_heads"] // tensor * text["head_dim"]
    attention = tokens * (3 * heads * BF16 + text["q_lora_rank"] * BF16 + (2 * text["head_dim"]) * (BF16 + F32))
    inner = text["moe_intermediate_size"] if expert else -(-text["moe_intermediate_size"] // tensor)
    arriving = tokens * text["num_experts_per_tok"]
    gathered = 0
    if expert and data > 1 and "A2" in hardware:
        arriving, gathered = arriving * data, tokens * data * hidden * BF16
    elif expert:  # tensor-parallel ranks send a part each
        arriving = arriving * UNEVEN // tensor
    experts = gathered + arriving * (hidden + 3 * inner + hidden * BF16)
    columns = (text.get("engram_max_ngram_size", 1) - 1) * text.get("engram_n_heads", 0)
    engram = tokens * (columns * text.get("engram_head_dim", 0) * BF16 + 2 * (streams_count + 1) * hidden * BF16)
    logits = seqs * (1 + draft) * text["vocab_size"] * F32 * 2
    peak = max(streams + max(attention, experts, engram), streams + logits)
    basis = f"shapes of a step of {tokens} tokens"
    return Activations(peak, streams, attention, experts, engram, logits, basis)
