"""Whether a run's numbers may be used, and why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..deploy.check.drafts import ACCEPTED, DRAFTS, ENOUGH, STUCK
from .records import Record
from .text import LOOPS

#: Share of answers that may be cut, empty or still in thought before a run says nothing about the model.
MOST_UNUSABLE = 0.02
#: Share of looping answers from which on a run is called degraded.
MOST_LOOPING = 0.05
STARTED = "process_start_time_seconds"


class Verdict(str, Enum):
    """``ok``: use it; ``degraded``: use it with what is said beside it; ``invalid``: do not use it."""

    OK = "ok"
    DEGRADED = "degraded"
    INVALID = "invalid"

    @property
    def status(self) -> int:
        """Exit status of the command."""
        return {Verdict.OK: 0, Verdict.DEGRADED: 1, Verdict.INVALID: 3}[self]


@dataclass
class Reasons:
    """Collects what is wrong with a run."""

    invalid: list[str] = field(default_factory=list)
    degraded: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """The worst of them."""
        if self.invalid:
            return Verdict.INVALID
        return Verdict.DEGRADED if self.degraded else Verdict.OK


@dataclass(frozen=True)
class Accounting:
    """Requests by what became of them."""

    expected: int
    asked: int
    kinds: Mapping[str, int]
    leaked: int
    looping: int
    reasoned: int
    models: tuple[str, ...]
    errors: tuple[str, ...]

    @property
    def failed(self) -> int:
        """Without a whole answer."""
        return self.kinds.get("failed", 0)

    @property
    def unusable(self) -> int:
        """Answered, and nothing to be judged by."""
        return sum(self.kinds.get(kind, 0) for kind in ("cut", "unfinished thought", "empty"))


def account(expected: int, records: Sequence[Record]) -> Accounting:
    """``expected``: requests that were to be sent."""
    answered = [record for record in records if record.answered]
    return Accounting(
        expected=expected,
        asked=len(records),
        kinds=dict(Counter(record.kind for record in records)),
        leaked=sum(record.leaked for record in answered),
        looping=sum(record.loops >= LOOPS for record in answered),
        reasoned=sum(record.reasoning > 0 for record in answered),
        models=tuple(sorted({record.model for record in answered if record.model})),
        errors=tuple(dict.fromkeys(record.error for record in records if record.error))[:5],
    )


def judge_requests(found: Accounting, model: str, thinking: bool | None, most: float, reasons: Reasons) -> None:
    """``thinking``: whether answers must have thoughts, None where that was not asked for."""
    if found.asked < found.expected:
        reasons.invalid.append(f"{found.expected - found.asked} of {found.expected} requests were never sent")
    if found.asked > found.expected:
        reasons.invalid.append(f"{found.asked} requests were sent for {found.expected} questions")
    if found.failed:
        said = f": {found.errors[0]}" if found.errors else ""
        reasons.invalid.append(f"{found.failed} of {found.asked} requests failed{said}")
    for kind in ("unfinished thought", "cut", "empty"):
        count = found.kinds.get(kind, 0)
        if count:
            share = found.unusable / found.asked
            text = f"{count} of {found.asked} answers: {kind}"
            (reasons.invalid if share > most else reasons.degraded).append(text)
    others = [name for name in found.models if name != model]
    if others:
        reasons.invalid.append(f"answers came from {', '.join(others)}; asked was {model}")
    if found.leaked:
        reasons.degraded.append(f"{found.leaked} answers hold </think>: serve with --reasoning-parser deepseek_v41")
    answered = found.asked - found.failed
    if thinking and answered and not found.reasoned:
        reasons.invalid.append("thinking was asked for and no answer has thoughts")
    if thinking is False and found.reasoned:
        reasons.invalid.append(f"thinking was turned off and {found.reasoned} answers have thoughts")
    if answered and found.looping > MOST_LOOPING * answered:
        reasons.degraded.append(f"{found.looping} of {answered} answers repeat themselves")


def judge_server(before: Mapping[str, float], after: Mapping[str, float], reasons: Reasons) -> None:
    """By /metrics before and after; nothing is said about a service without."""
    if not before:
        return
    if not after:
        reasons.invalid.append("/metrics no longer answers: the server ended")
        return
    if before.get(STARTED) != after.get(STARTED) or any(
        after.get(name, 0.0) < value for name, value in before.items() if name.endswith("_total")
    ):
        reasons.invalid.append("the server was started anew during the run")
    made = after.get(DRAFTS, 0.0) - before.get(DRAFTS, 0.0)
    accepted = after.get(ACCEPTED, 0.0) - before.get(ACCEPTED, 0.0)
    if after.get(STUCK, 0.0) > 0 or (made >= ENOUGH and accepted < 0.005 * made):
        reasons.degraded.append(
            f"the draft is stuck: {accepted:.0f} tokens of {made:.0f} drafts were accepted; answers are right and slow"
        )
