"""Which drafted tokens stay: in plain tensor operations, the same on every device.

vLLM's V1 runner has kernels in Triton for this, without block verification; what it puts in their place on a CPU does
not sample from the target's distribution (requests' temperatures become integers).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Generators = dict[int, torch.Generator]  # row of the batch -> its request's own random numbers


@dataclass(frozen=True)
class Drafted:
    """What R requests drafted, padded to K tokens each.

    ``rows``: [R, K] int64, index into the N drafted tokens, 0 where there is none; ``present``: [R, K] bool, a prefix
    of each row; ``tokens``: [R, K] int64; ``probabilities``: [N, V] float32, the distribution that each was drawn
    from, None when each was the only choice.
    """

    rows: Tensor
    present: Tensor
    tokens: Tensor
    probabilities: Tensor | None

    @classmethod
    def of(cls, counts: list[int], tokens: Tensor, probabilities: Tensor | None) -> Drafted:
        """counts: drafted tokens of each request; tokens: [N] ids, one request after another."""
        device = tokens.device
        lengths = torch.tensor(counts, device=device)
        column = torch.arange(max(counts, default=0), device=device)
        present = column < lengths[:, None]
        rows = torch.where(present, (lengths.cumsum(0) - lengths)[:, None] + column, 0)
        return cls(rows, present, tokens.long()[rows], probabilities)

    def own_probability(self) -> Tensor:
        """Of each drafted token: [R, K] float32."""
        if self.probabilities is None:
            return torch.ones(self.rows.shape, device=self.rows.device)
        return self.probabilities[self.rows, self.tokens]

    def distribution(self, column: Tensor) -> Tensor:
        """The distribution that the token in ``column`` [R] of each request was drawn from: [R, V]; V from
        ``probabilities``, which must not be None."""
        assert self.probabilities is not None
        return self.probabilities[self.rows.gather(1, column[:, None])[:, 0]]


def _prefix(accepted: Tensor) -> Tensor:
    """Length of the accepted prefix: [R, K] bool -> [R]."""
    return accepted.long().cumprod(1).sum(1)


def standard_length(drafted: Drafted, target: Tensor, uniform: Tensor) -> Tensor:
    """Tokens accepted one at a time, each with probability ``min(1, p / q)``.

    target: [N, V] float32 probabilities; uniform: [R, K]. Returns [R]. Source: Leviathan et al., "Fast Inference from
    Transformers via Speculative Decoding", algorithm 1.
    """
    p, q = target[drafted.rows, drafted.tokens], drafted.own_probability()
    return _prefix(drafted.present & (uniform * q < p))


def _residual(drafted: Drafted, target: Tensor, column: Tensor, factor: Tensor) -> Tensor:
    """``max(factor * p - q, 0)`` of the token in ``column`` [R]: [R, V]."""
    p = target[drafted.rows.gather(1, column[:, None])[:, 0]] * factor[:, None]
    if drafted.probabilities is not None:
        return (p - drafted.distribution(column)).clamp_min_(0)
    token = drafted.tokens.gather(1, column[:, None])
    return p.scatter(1, token, (p.gather(1, token) - 1).clamp_min(0))


def block_length(drafted: Drafted, target: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens accepted as a block: at least as many as one at a time, on average.

    Shapes as in ``standard_length``. Returns the accepted length [R] and, for each of the K + 1 lengths, the factor
    [R, K + 1] of p in the residual that the next token is drawn from. Source: Sun et al., "Block Verification
    Accelerates Speculative Decoding", algorithm 2.
    """
    p, q = target[drafted.rows, drafted.tokens], drafted.own_probability()
    requests, columns = drafted.rows.shape
    weight = torch.ones(requests, device=p.device)  # p_i of the paper
    weights, length = [weight], torch.zeros(requests, dtype=torch.long, device=p.device)
    end = drafted.present.sum(1)
    for i in range(columns):
        weight = torch.where(drafted.present[:, i], (weight * p[:, i] / q[:, i]).clamp_max(1), 0)
        weights.append(weight)
        following = torch.full_like(length, min(i + 1, columns - 1))
        mass = _residual(drafted, target, following, weight).sum(1)
        inner = mass / (mass + 1 - weight).clamp_min(torch.finfo(torch.float32).tiny)
        keep = torch.where(end == i + 1, weight, inner)
        length = torch.where(drafted.present[:, i] & (uniform[:, i] < keep), i + 1, length)
    return length, torch.stack(weights, dim=1)


def draw(weights: Tensor, generators: Generators) -> Tensor:
    """One index per row of ``weights`` [R, V] (not normalised): [R] int64, by an exponential race."""
    race = torch.empty_like(weights).exponential_()
    for row, generator in generators.items():
        race[row].exponential_(generator=generator)
    return (weights / race).argmax(1)


def verify(
    drafted: Drafted,
    logits: Tensor,
    bonus: Tensor,
    uniform: Tensor,
    greedy: Tensor | None,
    generators: Generators,
    block: bool = False,
    rates: Tensor | None = None,
) -> Tensor:
    """The tokens of this step: [R, K + 1] int32, -1 behind the last.

    logits: [N, V] float32 of the target in front of each drafted token, processed; bonus: [R] token for requests whose
    drafted tokens all stay; uniform: [R, K] in [0, 1); greedy: [R] bool, requests that take the most probable token,
    None: all; generators: of the other requests; block: block verification; rates: [K] probability of accepting a token
    whose predecessors were accepted, whatever it is (for measurements).
    """
    columns = drafted.rows.shape[1]
    best = logits.argmax(1)[drafted.rows]
    if rates is None:
        length = _prefix(drafted.present & (best == drafted.tokens))
    else:
        length = _prefix(drafted.present & (uniform < rates[:columns]))
    following = best.gather(1, length.clamp_max(columns - 1)[:, None])[:, 0]
    if greedy is not None:
        target = logits.softmax(1)
        factors = torch.ones(len(length), columns + 1, device=logits.device)
        sampled = length
        if rates is None and block:
            sampled, factors = block_length(drafted, target, uniform)
        elif rates is None:
            sampled = standard_length(drafted, target, uniform)
        at = sampled.clamp_max(columns - 1)
        residual = _residual(drafted, target, at, factors.gather(1, sampled[:, None])[:, 0])
        # nothing is left only where rounding rejected what should have been accepted: p and q agree
        lost = residual.sum(1, keepdim=True) <= 0
        residual = torch.where(lost, target[drafted.rows.gather(1, at[:, None])[:, 0]], residual)
        length = torch.where(greedy, length, sampled)
        following = torch.where(greedy, following, draw(residual, generators))
    following = torch.where(length == drafted.present.sum(1), bonus, following)
    column = torch.arange(columns + 1, device=logits.device)
    padded = torch.nn.functional.pad(drafted.tokens, (0, 1))
    tokens = torch.where(column < length[:, None], padded, -1)
    return tokens.scatter(1, length[:, None], following[:, None]).int()
