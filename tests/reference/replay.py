"""Running a golden case through the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_ascend_dsv41.reference import Model, State


@dataclass
class Replay:
    """What the golden files record, computed by the reference."""

    prefill_logits: Tensor
    decode_logits: Tensor
    prefill_main_hidden: Tensor
    decode_main_hidden: Tensor
    spec_output_ids: Tensor
    spec_logits: Tensor  # [steps, block, vocabulary], every step
    spec_confidence: Tensor
    prefill_taps: dict[str, Tensor]
    decode_taps: list[dict[str, Tensor]]


def prefill(model: Model, tokens: Tensor, embeddings: Tensor | None = None) -> Tensor:
    """Logits of every prompt position."""
    return model(tokens, State(), embeddings).logits


def replay(model: Model, case: dict[str, Tensor], embeddings: Tensor | None = None) -> Replay:
    """Prefill, then the recorded tokens one by one, drafting after each."""
    state, taps = State(), {}
    first = model(case["input_ids"], state, embeddings, tap=lambda name, value: taps.__setitem__(name, value))
    model.observe(first.main_hidden, state)
    tokens, steps = case["decode_tokens"], []
    anchors = [*tokens[1:].tolist(), int(case["decode_argmax"][-1])]
    decode_taps = []
    for token, anchor in zip(tokens, anchors, strict=True):
        own: dict[str, Tensor] = {}
        out = model(token[None], state, tap=lambda name, value, own=own: own.__setitem__(name, value))
        model.observe(out.main_hidden, state)
        steps.append((out, anchor, model.draft(anchor, state)))
        decode_taps.append(own)
    return Replay(
        first.logits,
        torch.cat([out.logits for out, _, _ in steps]),
        first.main_hidden,
        torch.cat([out.main_hidden for out, _, _ in steps]),
        torch.stack([torch.cat((torch.tensor([anchor]), draft.tokens)) for _, anchor, draft in steps]),
        torch.stack([draft.logits for _, _, draft in steps]),
        torch.stack([draft.confidence for _, _, draft in steps]),
        taps,
        decode_taps,
    )


def selected(topk: Tensor, rows: int) -> Tensor:
    """Golden selections [L, k], -1 padded -> mask [L, rows]."""
    mask = torch.zeros(len(topk), rows + 1, dtype=torch.bool)
    mask.scatter_(1, topk.long().where(topk >= 0, rows), True)
    return mask[:, :rows]
