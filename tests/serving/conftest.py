"""Engines, made when first asked for; one lives at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from serving.harness import Engine


@pytest.fixture(scope="session")
def engine(converted) -> Any:
    """``engine("a", "bf16", max_num_batched_tokens=64)``: the same arguments give the same engine again."""
    alive: dict[tuple[str, str, str], Engine] = {}

    def make(preset: str, weights: str, **options: Any) -> Engine:
        key = (preset, weights, repr(sorted(options.items())))
        if key not in alive:
            for other in alive.values():
                other.close()
            alive.clear()
            alive[key] = Engine(str(converted(preset, weights)), **options)
        alive[key].forget()
        alive[key].budget(options.get("max_num_batched_tokens", 2048))
        return alive[key]

    yield make
    for other in alive.values():
        other.close()


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    """Random prompts of given lengths: no special tokens, no image placeholder."""

    def make(*lengths: int, seed: int = 0) -> list[list[int]]:
        source = random.Random(seed)
        return [[source.randrange(3, 370) for _ in range(length)] for length in lengths]

    return make
