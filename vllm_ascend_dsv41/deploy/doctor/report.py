"""What checks say, and how it is printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from ..launch import table

WIDTH = 17  # of the longest name of a check: parts that are printed one after another stay in line


class Status(Enum):
    """The words of ascend-dmi."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True)
class Result:
    """One line: what was looked at, what was found and expected, what to do."""

    check: str
    status: Status
    found: str
    expected: str = ""
    remedy: str = ""

    def as_json(self) -> dict[str, Any]:
        """For other programs."""
        return {**asdict(self), "status": self.status.value}


def good(check: str, found: str) -> Result:
    """Nothing to do."""
    return Result(check, Status.PASS, found)


def skip(check: str, why: str) -> Result:
    """Could not or need not be looked at."""
    return Result(check, Status.SKIP, why)


def bad(check: str, found: str, expected: str, remedy: str) -> Result:
    """Ends or spoils a start."""
    return Result(check, Status.FAIL, found, expected, remedy)


def warn(check: str, found: str, expected: str, remedy: str) -> Result:
    """May be meant."""
    return Result(check, Status.WARN, found, expected, remedy)


def text(results: Sequence[Result], node: str) -> str:
    """A line per check, and what to do under those that are not PASS or SKIP."""
    rows = table([(r.status.value, r.check.ljust(WIDTH), " ".join(r.found.split())) for r in results]).splitlines()
    lines = [f"node {node}"] if node else []
    for row, result in zip(rows, results, strict=True):
        lines.append(row)
        if result.status in (Status.FAIL, Status.WARN):
            lines.append(f"        expected: {result.expected}")
            lines.append(f"        remedy:   {result.remedy}")
    counts = Counter(result.status for result in results)
    lines.append(", ".join(f"{counts[status]} {status.value}" for status in Status))
    return "\n".join(lines)


def failed(results: Iterable[Result]) -> bool:
    """Whether anything must be changed before a start."""
    return any(result.status is Status.FAIL for result in results)
