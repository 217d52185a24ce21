"""Where the reference itself is undecided: two choices closer than float32 sums in another order agree.

A selection, a candidate block or a route that falls the other way changes that row's logits and, through
the caches, those after it. It happens once in some thousand rows; tolerances hold before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_ascend_dsv41.reference import Model, State

UNDECIDED = 3e-6  # relative to the largest score of the row; float32 sums differ by some 5e-7


def _gap(scores: Tensor, k: int) -> Tensor:
    """[L]: distance between the k-th and the next best, relative to the largest magnitude; inf if there is no next."""
    if scores.shape[1] <= k:
        return torch.full((len(scores),), torch.inf)
    best = scores.sort(dim=1, descending=True).values
    size = scores.abs().masked_fill(~torch.isfinite(scores), 0).amax(1).clamp_min(1e-30)
    return ((best[:, k - 1] - best[:, k]) / size).nan_to_num(torch.inf)


def first_undecided(model: Model, tokens: list[int]) -> tuple[Tensor, int]:
    """The reference's logits [L, vocabulary], and the first position whose choices are undecided (L: none)."""
    taps: dict[str, Tensor] = {}
    logits = model(torch.tensor(tokens), State(), tap=lambda name, value: taps.__setitem__(name, value)).logits
    config: Any = model.config
    gaps = []
    for name, scores in taps.items():
        if name.endswith(".gate_scores"):
            gaps.append(_gap(scores, config.num_experts_per_tok))
        elif name.startswith("index") and name.endswith(".scores"):
            gaps.append(_gap(scores, config.index_topk))
            if name == f"index{config.candidate_source_layer_id}.scores":
                size = config.candidate_block_size
                padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
                best = padded.unflatten(1, (-1, size)).amax(-1)
                newest = torch.isfinite(padded).sum(1).sub(1).clamp_min(0) // size
                best = best.scatter(1, newest[:, None], 1e4)  # pinned: always in
                gaps.append(
                    _gap(best, config.candidate_topk_blocks)
                    * 1e4
                    / best.masked_fill(best >= 1e4, 0)
                    .abs()
                    .masked_fill(~torch.isfinite(best), 0)
                    .amax(1)
                    .clamp_min(1e-30)
                )
    undecided = (torch.stack(gaps).amin(0) < UNDECIDED).nonzero()
    return logits, int(undecided[0]) if len(undecided) else len(tokens)
