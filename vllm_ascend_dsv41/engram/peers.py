"""Ranks that act together: what one of them cannot do, none of them goes on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from .memory import give_back

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another rank failed or ended; this one did nothing wrong."""


class Peers:
    """The ranks of a group whose collectives run on the CPU (Gloo); alone without one."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()

    def exchange(self, value: Any, what: str) -> list[Any]:
        """What every rank says, by rank. Raises PeerError when one is gone."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            reason = "another rank ended meanwhile; its own log says why"
            if "timed out" in str(error).lower():
                reason = "another rank gave no answer in time: is one stopped, or its storage very slow?"
            raise PeerError(f"{what}: {reason} ({error})") from error
        return values

    def together(self, what: str, function: Callable[[], T]) -> T:
        """Call the function on every rank. Where it raises, the exception goes on; every other rank closes its result,
        if that can be closed, and raises PeerError with the text."""
        error, result = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        try:
            said = self.exchange(None if error is None else f"{type(error).__name__}: {error}", what)
        except PeerError:
            if error is not None:
                raise error from None
            _close(result)
            raise
        if error is not None:
            raise error
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text is not None]
        if failures:
            _close(result)
            raise PeerError(f"{what}: {'; '.join(failures)}")
        return result  # type: ignore[return-value]


def _close(result: Any) -> None:
    if hasattr(result, "close"):
        give_back(result)  # what it may raise must not hide what the peer said
