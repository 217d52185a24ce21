"""``dsv41 selftest``: every operator implementation of this machine against its reference, and what serving needs of
the device around them. It is what runs first on new hardware."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from ..ops.compare import Comparison, compare
from ..ops.registry import REFERENCE, operators
from .device_checks import CHECKS, SYSTEM_CHECKS, Check, prepare, tried


def _line(result: Comparison) -> str:
    if result.refused:
        dtype = str(result.dtype).removeprefix("torch.")
        return f"{result.operator:20} {result.implementation:10} {dtype:9} REFUSED {result.title}: {result.refused}"
    verdict = "ok" if result.passed else "FAILED"
    dtype = str(result.dtype).removeprefix("torch.")
    return (
        f"{result.operator:20} {result.implementation:10} {dtype:9} {result.absolute:10.2e} {result.error:10.2e} "
        f"{result.bound:10.2e}  {verdict:7} {result.title}"
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no other numbers


def _as_json(result: Comparison) -> dict[str, Any]:
    return {
        "operator": result.operator,
        "implementation": result.implementation,
        "example": result.title,
        "dtype": str(result.dtype).removeprefix("torch."),
        "max_abs": _finite(result.absolute),
        "max_rel": _finite(result.error),
        "refused": result.refused,
        "bound": result.bound,
        "passed": result.passed,
    }


def selftest(
    device: str = "cpu",
    seed: int = 0,
    only: Collection[str] = (),
    as_json: bool = False,
    quick: bool = False,
    ranks: int = 0,
) -> int:
    """Print one line per implementation and example, then per check of the device. Returns 0 when all hold, else 1.

    only: names of operators; everything else is then left out. quick: no collectives, no model. ranks: processes that
    exchange (0: one for each visible device, two on a CPU). Raises ValueError for names and devices that there are not.
    """
    kind = device.partition(":")[0]
    unknown = sorted(set(only) - {op.name for op in operators()})
    if unknown:
        known = ", ".join(op.name for op in operators())
        raise ValueError(f"--ops {','.join(unknown)}: no such operator; there are {known}")
    if ranks and (only or quick):
        raise ValueError("--ranks is for the collectives, which --ops and --quick leave out")
    with _output_to_stderr() if as_json else contextlib.nullcontext():
        try:
            prepare(kind)
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
            raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
        results, checks = _run(device, kind, seed, only, quick, ranks, not as_json)
    if as_json:
        compared = [_as_json(r) for r in results if r.implementation != REFERENCE]
        print(json.dumps({"device": device, "operators": compared, "checks": [vars(c) for c in checks]}))
    else:
        _summarise(device, kind, results, checks, only)
    return 0 if all(r.passed for r in results) and all(c.passed for c in checks) else 1


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Standard output is the result's alone: libraries, in C++ too, log to it."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _run(
    device: str, kind: str, seed: int, only: Collection[str], quick: bool, ranks: int, show: bool
) -> tuple[list[Comparison], list[Check]]:
    """Everything that was asked for; lines are shown as they come."""
    results: list[Comparison] = []
    checks: list[Check] = []
    if show:
        print(
            f"{'operator':20} {'runs as':10} {'dtype':9} {'max abs':>10} {'max rel':>10} {'bound':>10}  verdict example"
        )
    for result in compare(seed, device, only):
        results.append(result)
        if show and result.implementation != REFERENCE:
            print(_line(result), flush=True)
    wanted: list[tuple[Callable[..., Check], tuple[Any, ...]]] = []
    if not only:
        wanted += [(check, (device,)) for check in CHECKS.get(kind, ())]
    if not only and not quick:
        wanted += [(check, (device, ranks)) for check in SYSTEM_CHECKS]
    for check, arguments in wanted:
        checks.append(found := tried(check, *arguments))
        if show:
            print(f"{found.name:42} {'ok' if found.passed else 'FAILED':7} {found.found}", flush=True)
    return results, checks


def _summarise(device: str, kind: str, results: list[Comparison], checks: list[Check], only: Collection[str]) -> None:
    if not only:
        own = {op.name for op in operators() if len(op.implementations) > 1 and kind in op.implementations}
        alone = sorted(op.name for op in operators() if op.name not in own)
        print(f"\nserved by the reference on {device}: {', '.join(alone) or 'none'}")
    failed = [result for result in results if not result.passed]
    compared = sum(result.implementation != REFERENCE for result in results)
    print(f"{compared} comparisons on {device}, {len(failed)} failed")
    if checks:
        print(f"{len(checks)} checks beside them, {sum(not c.passed for c in checks)} failed")
