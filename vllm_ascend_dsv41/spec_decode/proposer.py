"""Drafts a block of tokens after the newest token of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..upstream import set_forward_context
from .verification import Generators, draw


@dataclass
class Proposal:
    """Blocks of K tokens of R requests."""

    tokens: Tensor  # [R, K] int64
    hidden: Tensor  # [R, K, D] in front of the final norm, for the confidence head
    logits: Tensor  # [R, K, V] float32, Markov bias included
    probabilities: Tensor | None  # [R, K, V] float32 that the tokens were drawn from; None: greedy


class DSparkProposer:
    """Made by vLLM's V1 runner, which knows it as a class of the user's own; used by ``DSparkRunner``."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        config = vllm_config.speculative_config
        self.size: int = config.num_speculative_tokens
        self.probabilistic: bool = config.draft_sample_method == "probabilistic"
        self._target: Any = None

    def load_model(self, model: Any) -> None:
        """vLLM's call once the target is loaded: the draft is part of it."""
        self._target = model

    @property
    def window_prefixes(self) -> list[str]:
        """Names of the window caches that drafting reads."""
        names: list[str] = self._target.model.mtp.window_prefixes
        return names

    def propose(
        self,
        anchors: Tensor,
        last: Tensor,
        tables: dict[str, Tensor],
        temperature: Tensor | None = None,
        generators: Generators | None = None,
    ) -> Proposal:
        """Draft for R requests.

        anchors: [R] int64, newest tokens; last: [R] int64, positions of the tokens before them, both on the host;
        tables: block table [R, blocks] of each window; temperature: [R] float32, 0 for greedy requests, None: all
        greedy; generators: of requests with a seed, by row. Every data-parallel rank must come here or to ``idle`` in
        every step.
        """
        requests = len(anchors)
        with self.forward_context(requests * self.size):
            hidden, logits = self._target.draft(anchors, last, tables, self.size)
        logits = logits.view(requests, self.size, -1)
        sampling = self.probabilistic and temperature is not None
        tokens, probabilities, previous = [], [], anchors.to(self.device)
        for i in range(self.size):  # each token biases the next
            row = logits[:, i].add_(self._target.model.mtp.markov_bias(previous))
            previous = row.argmax(1)
            if sampling and temperature is not None:
                greedy = temperature == 0
                probability = (row / torch.where(greedy, 1.0, temperature)[:, None]).softmax(1)
                previous = torch.where(greedy, previous, draw(probability, generators or {}))
                probabilities.append(probability)
            tokens.append(previous)
        return Proposal(
            torch.stack(tokens, 1),
            hidden.view(requests, self.size, -1),
            logits,
            torch.stack(probabilities, 1) if probabilities else None,
        )

    def forward_context(self, tokens: int) -> Any:
        """vLLM's, for a pass of the draft over so many tokens."""
        return set_forward_context(None, self.vllm_config, num_tokens=tokens)

    @property
    def device(self) -> torch.device:
        """Of the draft."""
        device: torch.device = self._target.model.mtp.main_proj.weight.device
        return device

    def idle(self) -> None:
        """Take part in the collectives of a step in which other data-parallel ranks draft."""
        nothing = torch.zeros(1, dtype=torch.long)
        self.propose(nothing, nothing, {})

    def confidence(self, proposal: Proposal, anchors: Tensor) -> Tensor:
        """Logits of the confidence head: [R, K] float32."""
        before = torch.cat((anchors.to(self.device)[:, None], proposal.tokens[:, :-1]), 1)
        flat: Tensor = self._target.model.mtp.confidence(proposal.hidden.flatten(0, 1), before.flatten())
        return flat.view_as(proposal.tokens)
