"""Which tokens of which requests a step computes: what paged operators address rows by."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class Batch:
    """T tokens of R requests; tokens of a request stand together, in order.

    What is derived here has shapes that do not depend on data and reads nothing on the host: a graph that was captured
    with it follows the two tensors. Padding has negative positions: tokens of requests of length 0, and tokens behind
    the last request.
    """

    query_start: Tensor  # [R + 1] int32, first token of each request, then the end
    lengths: Tensor  # [R] int32, tokens of each request up to and with this step's
    tokens: int  # T
    longest: int = 0  # no request has more tokens in this step (a bound, for kernels that divide their work)
    furthest: int = 0  # no request is longer
    #: What kernels work out once per step for all layers, by what they were asked for.
    plans: dict[Hashable, Tensor] = field(default_factory=dict)
    _compressed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """R."""
        return len(self.lengths)

    def to_host(self) -> Batch:
        """The same on the CPU."""
        return Batch(self.query_start.cpu(), self.lengths.cpu(), self.tokens, self.longest, self.furthest)

    @cached_property
    def request(self) -> Tensor:
        """[T] int64, ascending."""
        token = torch.arange(self.tokens, dtype=torch.int32, device=self.lengths.device)
        return (self.query_start[1:-1, None] <= token).sum(0)

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64, of each token in its request."""
        token = torch.arange(self.tokens, device=self.lengths.device)
        behind = self.query_start[1:] - self.lengths  # a request's first position would be token number this
        inside = token < self.query_start[-1]
        return torch.where(inside, token - behind.long().index_select(0, self.request), -1)

    @cached_property
    def last(self) -> Tensor:
        """[T] int64, final position of each token's request."""
        return self.lengths.long().index_select(0, self.request) - 1

    @cached_property
    def first(self) -> Tensor:
        """[T] bool: the token is its request's first of this step."""
        token = torch.arange(self.tokens, dtype=torch.int32, device=self.lengths.device)
        return token == self.query_start.index_select(0, self.request)

    def compressed(self, ratio: int) -> tuple[Tensor, Tensor]:
        """[R] int32 each: complete groups of ``ratio`` tokens, and tokens behind the last of them."""
        if ratio not in self._compressed:
            groups = torch.div(self.lengths, ratio, rounding_mode="floor") if ratio > 1 else self.lengths
            rest = self.lengths - groups * ratio if ratio > 1 else torch.zeros_like(self.lengths)
            self._compressed[ratio] = groups, rest
        return self._compressed[ratio]


@dataclass
class Blocks:
    """Blocks of K drafted tokens behind R requests: every token of a block sees the same."""

    last: Tensor  # [R] int64 on the host, position of the last stored token
    size: int  # K
    derived: dict[Hashable, object] = field(default_factory=dict)

    @cached_property
    def request(self) -> Tensor:
        """[R K] int64."""
        return torch.arange(len(self.last), device=self.last.device).repeat_interleave(self.size)
