"""Giving upstream's code another object for a name, while one of its methods runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exchanged(module: Any, name: str, value: Any) -> Iterator[None]:
    """``module.name`` is ``value`` inside. Raises AttributeError when upstream has no such name any more."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
