"""The reference's drafts for a sequence, to compare served ones with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_ascend_dsv41.reference import Model, State
from vllm_ascend_dsv41.reference.model import Draft


def dspark(**options: Any) -> dict[str, Any]:
    """--speculative-config as the guides give it."""
    return {"method": "dspark", "num_speculative_tokens": 5, "enforce_eager": True, **options}


@dataclass
class Drafter:
    """The reference's draft behind any prefix of a sequence that the trunk has seen once."""

    model: Model
    window: dict[int, Tensor]
    logits: Tensor

    @classmethod
    def over(cls, model: Model, tokens: list[int]) -> Drafter:
        state = State()
        output = model(torch.tensor(tokens), state)
        model.observe(output.main_hidden, state)
        return cls(model, state.draft_window, output.logits)

    def after(self, anchor: int, position: int) -> Draft:
        """The block behind ``anchor``, which stands at ``position``: the trunk has seen what is in front of it."""
        state = State(draft_window={stage: rows[:position] for stage, rows in self.window.items()})
        return self.model.draft(anchor, state)


def accepted_lengths(drafter: Drafter, tokens: list[int], first: int, size: int) -> list[int]:
    """How many tokens of each draft a greedy trunk accepts: ``tokens`` is its whole text, generated from position
    ``first`` on."""
    lengths, position = [], first
    while position < len(tokens) - 1:
        drafted = drafter.after(tokens[position], position).tokens.tolist()[:size]
        n = 0
        while n < len(drafted) and position + n + 1 < len(tokens) and tokens[position + n + 1] == drafted[n]:
            n += 1
        lengths.append(n)
        position += n + 1
    return lengths
