"""``dsv41 selftest``: every operator implementation of this machine against its reference, and what serving needs of
the device around them. It is what runs first on new hardware."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import torch

from ..ops.compare import Comparison, compare
from ..ops.registry import REFERENCE, operators
from .device_checks import CHECKS, SYSTEM_CHECKS, Check, prepare


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


def _as_json(result: Comparison) -> dict[str, Any]:
    return {
        "operator": result.operator,
        "implementation": result.implementation,
        "example": result.title,
        "dtype": str(result.dtype).removeprefix("torch."),
        "max_abs": None if result.refused else result.absolute,
        "max_rel": None if result.refused else result.error,
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
    try:
        prepare(kind)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    results = list(compare(seed, device, only))
    checks = [] if only else [check(device) for check in CHECKS.get(kind, ())]
    if not only and not quick:
        checks += [check(device, ranks) for check in SYSTEM_CHECKS]
    if as_json:
        compared = [_as_json(r) for r in results if r.implementation != REFERENCE]
        print(json.dumps({"device": device, "operators": compared, "checks": [vars(c) for c in checks]}))
    else:
        _print(device, kind, results, checks, only)
    return 0 if all(r.passed for r in results) and all(c.passed for c in checks) else 1


def _print(device: str, kind: str, results: list[Comparison], checks: list[Check], only: Collection[str]) -> None:
    print(f"{'operator':20} {'runs as':10} {'dtype':9} {'max abs':>10} {'max rel':>10} {'bound':>10}  verdict example")
    for result in results:
        if result.implementation != REFERENCE:
            print(_line(result))
    for check in checks:
        print(f"{check.name:42} {'ok' if check.passed else 'FAILED':7} {check.found}")
    if not only:
        own = {op.name for op in operators() if len(op.implementations) > 1 and kind in op.implementations}
        alone = sorted(op.name for op in operators() if op.name not in own)
        print(f"\nserved by the reference on {device}: {', '.join(alone) or 'none'}")
    failed = [result for result in results if not result.passed]
    compared = sum(result.implementation != REFERENCE for result in results)
    print(f"{compared} comparisons on {device}, {len(failed)} failed")
    if checks:
        print(f"{len(checks)} checks of the device, {sum(not c.passed for c in checks)} failed")
