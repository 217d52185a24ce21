"""Where the reference itself is undecided: two choices closer than float32 sums in another order agree.

A selection, a candidate block or a route that falls the other way changes that row's logits and, through
the caches, those after it. It happens once in some thousand rows; tolerances hold before it.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

from vllm_ascend_dsv41.reference import Model, State
from vllm_ascend_dsv41.reference import model as reference_model

UNDECIDED = 3e-6  # relative to the score at the boundary; float32 sums differ by some 5e-7


def _gap(scores: Tensor, k: int) -> Tensor:
    """[L]: distance between the k-th best of a row and the next, relative to the k-th; inf if there is no next."""
    if scores.shape[1] <= k:
        return torch.full((len(scores),), torch.inf)
    best = scores.float().sort(dim=1, descending=True).values
    last, following = best[:, k - 1], best[:, k]
    return ((last - following) / last.abs().clamp_min(1e-30)).nan_to_num(torch.inf, torch.inf)


def first_undecided(model: Model, tokens: list[int]) -> tuple[Tensor, int]:
    """The reference's logits [L, vocabulary], and the first position whose choices are undecided (L: none)."""
    gaps, right = [], reference_model.top_k

    def recording(scores: Tensor, k: int) -> Tensor:
        gaps.append(_gap(scores, k))
        return right(scores, k)

    with patch.object(reference_model, "top_k", recording):  # every choice of the model goes through it
        logits = model(torch.tensor(tokens), State()).logits
    undecided = (torch.stack(gaps).amin(0) < UNDECIDED).nonzero()
    return logits, int(undecided[0]) if len(undecided) else len(tokens)
