"""Engines, made when first asked for; one lives at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from measures import rms

from serving.harness import Engine
from serving.ties import first_undecided
from vllm_ascend_dsv41.reference import Grid

EXACT = 1e-5
GRIDS = {
    "float32": ("bf16", {"dtype": "float32"}, Grid.EXACT, torch.float32, EXACT),
    "bfloat16": ("bf16", {"dtype": "bfloat16"}, Grid.EXACT, torch.bfloat16, 0.05),
    "w8a8": ("w8a8", {"dtype": "bfloat16"}, Grid.W8A8, torch.bfloat16, 0.05),
}


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


@pytest.fixture(scope="session")
def check(converted, reference):
    """Compare every computation of every position with the reference run over the whole sequence at once."""

    def compare(results, preset="a", grid="float32", weights=None):
        usual, _, kind, dtype, tolerance = GRIDS[grid]
        model = reference(converted(preset, weights or usual), kind, dtype)
        sharp = total = 0
        everything = []
        for result in results:
            sequence = (result.prompt + result.tokens)[:-1] if result.tokens else result.prompt
            wanted, undecided = first_undecided(model, sequence)
            assert result.logits
            rows = [(p, row) for p, computed in result.verified().items() for row in computed]
            found, want = torch.stack([row for _, row in rows]), torch.stack([wanted[p] for p, _ in rows])
            error = (found - want).norm(dim=1) / want.norm(dim=1)
            if grid == "float32":
                decided = torch.tensor([p < undecided for p, _ in rows])
                assert error[decided].max() <= tolerance if decided.any() else True, (len(result.prompt), undecided)
                assert error.max() <= 0.1  # a choice that fell the other way, nothing worse
                sharp, total = sharp + int(decided.sum()), total + len(decided)
            else:  # a request behind a prefix hit has a dozen rows: one route that flips weighs more in it
                assert rms(found, want) <= 2 * tolerance, (len(result.prompt), rms(found, want))
                everything.append((found, want))
        if grid == "float32":
            assert sharp >= 0.5 * total, (sharp, total)
        else:
            found, want = (torch.cat(side) for side in zip(*everything, strict=True))
            assert rms(found, want) <= tolerance, rms(found, want)

    return compare
