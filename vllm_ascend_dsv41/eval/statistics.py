"""What a score is worth: intervals of shares, and paired comparisons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import EvalError

CONFIDENCE = 0.95


def _binomtest() -> Any:
    try:
        from scipy.stats import binomtest
    except ImportError as error:
        raise EvalError("scipy is missing; pip install 'vllm-ascend-dsv41[eval]'") from error
    return binomtest


def interval(right: int, total: int) -> tuple[float, float]:
    """Wilson's interval of a share at 95 %, 0 to 1 each."""
    if not total:
        return 0.0, 1.0
    found = _binomtest()(right, total).proportion_ci(CONFIDENCE, method="wilson")
    return float(found.low), float(found.high)


@dataclass(frozen=True)
class Paired:
    """Two runs over the same questions."""

    both: int
    only_first: int
    only_second: int
    neither: int

    @property
    def p(self) -> float:
        """McNemar's test, exact: probability of so uneven a split of the questions on which the runs differ, if both
        were equally good."""
        differ = self.only_first + self.only_second
        return float(_binomtest()(self.only_first, differ).pvalue) if differ else 1.0
