"""What was checked and what came out."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"


@dataclass(frozen=True)
class Finding:
    """One line of the result. ``detail``: what was found; for a failure also what was expected and what to do."""

    check: str
    verdict: str
    detail: str


@dataclass(frozen=True)
class TensorError:
    """A tensor compared with its source. ``relative_error``: norm of the difference over norm of the source;
    ``max_code``: largest magnitude of the INT8 codes, None for floating point; ``problem``: empty when it is as it must
    be.
    """

    name: str
    kind: str
    rows: int
    relative_error: float
    max_code: int | None
    problem: str


@dataclass
class Report:
    """All findings of one checkpoint."""

    checkpoint: str
    findings: list[Finding] = field(default_factory=list)
    tensors: list[TensorError] = field(default_factory=list)

    def add(self, check: str, problems: list[str], detail: str) -> None:
        """A finding: fails with ``problems`` if there are any, else passes with ``detail``."""
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        self.findings.append(Finding(check, FAIL if problems else PASS, shown if problems else detail))

    def skip(self, check: str, reason: str) -> None:
        """A check that could not be made."""
        self.findings.append(Finding(check, SKIP, reason))

    @property
    def holds(self) -> bool:
        """Nothing failed."""
        return all(finding.verdict != FAIL for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """JSON types; a relative error that is not finite becomes None."""
        result = {"holds": self.holds, **asdict(self)}
        for tensor in result["tensors"]:
            if not math.isfinite(tensor["relative_error"]):
                tensor["relative_error"] = None
        return result

    def print(self) -> None:
        """One line per finding, then errors by kind of tensor."""
        for finding in self.findings:
            line = f"{finding.verdict}  {finding.check:12} {finding.detail}"
            print(line.encode("utf-8", "backslashreplace").decode())  # file names may be anything
        kinds: dict[str, list[TensorError]] = {}
        for tensor in self.tensors:
            kinds.setdefault(tensor.kind, []).append(tensor)
        if kinds:
            print(
                f"\n{'kind':12} {'tensors':>8} {'rows':>12} {'mean error':>11} {'max error':>11} {'max code':>8}  worst"
            )
        for kind, tensors in kinds.items():
            worst = max(tensors, key=lambda tensor: tensor.relative_error)
            mean = sum(tensor.relative_error for tensor in tensors) / len(tensors)
            codes = [tensor.max_code for tensor in tensors if tensor.max_code is not None]
            print(
                f"{kind:12} {len(tensors):8,} {sum(tensor.rows for tensor in tensors):12,} {mean:11.2e} "
                f"{worst.relative_error:11.2e} {max(codes) if codes else '-':>8}  {worst.name}"
            )
        print(f"\n{self.checkpoint}: {'everything checked holds' if self.holds else 'NOT as it must be'}")
