"""``dsv41 selftest``: every operator implementation of this machine against its reference."""

from __future__ import annotations

import torch

from ..ops.compare import Comparison, compare
from ..ops.registry import REFERENCE, operators


def _line(result: Comparison) -> str:
    verdict = "ok" if result.passed else "FAILED"
    dtype = str(result.dtype).removeprefix("torch.")
    return (
        f"{result.operator:20} {result.implementation:10} {dtype:9} {result.absolute:10.2e} {result.error:10.2e} "
        f"{result.bound:10.2e}  {verdict:7} {result.title}"
    )


def selftest(device: str = "cpu", seed: int = 0) -> int:
    """Print one line per implementation and example. Returns 0 when all are within their bounds, else 1."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
    print(f"{'operator':20} {'runs as':10} {'dtype':9} {'max abs':>10} {'max rel':>10} {'bound':>10}  verdict example")
    results = list(compare(seed, device))
    for result in results:
        if result.implementation != REFERENCE:
            print(_line(result))
    own = {op.name for op in operators() if len(op.implementations) > 1 and device in op.implementations}
    alone = sorted(op.name for op in operators() if op.name not in own)
    print(f"\nserved by the reference on {device}: {', '.join(alone) or 'none'}")
    failed = [result for result in results if not result.passed]
    compared = sum(result.implementation != REFERENCE for result in results)
    print(f"{compared} comparisons on {device}, {len(failed)} failed")
    return 1 if failed else 0
