"""``dsv41 eval compare A B``: whether two runs may be compared, and if so what their difference is worth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..deploy.fingerprint import differences
from ..deploy.launch import table
from . import manifest
from .accuracy import QUESTIONS
from .errors import EvalError
from .statistics import Paired
from .verdict import Verdict

SIGNIFICANT = 0.05


@dataclass
class Comparison:
    """``against``: why the two may not be compared; ``cautions``: what to keep in mind; ``subject``: what differs, and
    may be what the two were made to compare."""

    against: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)
    subject: list[str] = field(default_factory=list)
    paired: Paired | None = None
    numbers: list[tuple[str, float, float]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For other programs."""
        paired = self.paired
        return {
            "schema": 1,
            "comparable": not self.against,
            "against": self.against,
            "cautions": self.cautions,
            "subject": self.subject,
            "numbers": [{"name": name, "first": one, "second": two} for name, one, two in self.numbers],
            "paired": None
            if paired is None
            else {
                "both_right": paired.both,
                "only_first": paired.only_first,
                "only_second": paired.only_second,
                "neither": paired.neither,
                "p": paired.p,
                "significant": paired.p < SIGNIFICANT,
            },
        }


def compare(one: Path, other: Path) -> Comparison:
    """Two runs' folders or manifests. Raises EvalError."""
    first, second = manifest.read(one), manifest.read(other)
    found = Comparison()
    if first.kind != second.kind:
        found.against.append(f"kind: {first.kind} / {second.kind}")
        return found
    for name, made in (("first", first), ("second", second)):
        if made.verdict is Verdict.INVALID:
            found.against.append(f"the {name} run is invalid: {made.reasons[0]}")
        found.cautions += [f"the {name} run: {reason}" for reason in made.reasons if made.verdict is Verdict.DEGRADED]
    _conditions(first, second, found)
    _subject(first, second, found)
    if first.kind == "accuracy":
        _scores(first, second, _questions(one), _questions(other), found)
    else:
        _speeds(first, second, found)
    return found


def _conditions(first: manifest.Manifest, second: manifest.Manifest, found: Comparison) -> None:
    """What must be equal: questions, how they are encoded, effort and sampling."""
    for name in ("dataset", "effort", "sampling"):
        mine, theirs = getattr(first, name).model_dump(), getattr(second, name).model_dump()
        if name == "effort" and None in (mine["in_prompt"], theirs["in_prompt"]) and mine["asked"] == theirs["asked"]:
            mine["in_prompt"] = theirs["in_prompt"] = None
        if name == "sampling":
            for given in (mine, theirs):
                given.pop("server_defaults")  # of options that requests do not say: a caution
            if mine.pop("seed") != theirs.pop("seed"):
                found.cautions.append("the seeds differ")
        found.against += [f"{name}: {text}" for text in _differences(mine, theirs)]
    if first.sampling.server_defaults != second.sampling.server_defaults:
        found.cautions.append("the servers' sampling defaults differ, or one is not recorded")
    ids = first.encoder.token_ids, second.encoder.token_ids
    if None in ids:
        found.cautions.append("how prompts are encoded was not recorded in both")
    elif ids[0] != ids[1] and first.effort == second.effort:
        found.against.append("encoder: the same question has other token ids")
    if first.tools != second.tools:
        found.against.append(f"tools: {first.tools} / {second.tools}")
    for name, made in (("first", first), ("second", second)):
        if made.checkpoint.path is None:
            found.cautions.append(f"the {name} run does not say which checkpoint answered")


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Files by their digests."""
    flat = []
    for one in (mine, theirs):
        files = {file["path"]: file["sha256"][:16] for file in one.get("files", ())}
        flat.append({**one, "files": files} if "files" in one else one)
    return differences(flat[0], flat[1])


def _subject(first: manifest.Manifest, second: manifest.Manifest, found: Comparison) -> None:
    mine, theirs = first.model_dump(), second.model_dump()
    for name in ("checkpoint", "topology", "engram", "image_digest", "versions"):
        one, other = mine[name], theirs[name]
        if name == "checkpoint":
            one, other = ({k: v for k, v in x.items() if k != "path"} for x in (one, other))
        if isinstance(one, dict) and isinstance(other, dict):
            found.subject += [f"{name}: {text}" for text in differences(one, other)]
        elif one != other:
            found.subject.append(f"{name}: {one} / {other}")
    if first.draft.method != second.draft.method:
        found.subject.append(f"draft: {first.draft.method} / {second.draft.method}")


def _questions(path: Path) -> dict[tuple[str, int, str], bool | None]:
    file = (path if path.is_dir() else path.parent) / QUESTIONS
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return {(row["part"], row["number"], row["key"]): row["right"] for row in rows}
    except OSError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise EvalError(f"{file}: cannot be read ({type(error).__name__}: {error})") from error


def _scores(
    first: manifest.Manifest,
    second: manifest.Manifest,
    mine: Mapping[tuple[str, int, str], bool | None],
    theirs: Mapping[tuple[str, int, str], bool | None],
    found: Comparison,
) -> None:
    if first.score is None or second.score is None:
        found.against.append("a run has no score")
        return
    found.numbers.append((first.score.metric, first.score.value, second.score.value))
    if not mine or not theirs:
        found.cautions.append(f"no paired test: a run has no {QUESTIONS} beside its manifest")
        return
    if set(mine) != set(theirs) and not found.against:
        found.against.append("the questions differ, though the files are equal")
    pairs = [(mine[key], theirs[key]) for key in mine if key in theirs]
    if found.against:
        return
    if not pairs or any(None in pair for pair in pairs):
        found.cautions.append("no paired test: AISBench does not say of each question whether its answer is right")
        return
    found.paired = Paired(*(pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False))))


def _speeds(first: manifest.Manifest, second: manifest.Manifest, found: Comparison) -> None:
    theirs = {(level.tool, level.concurrency): level for level in second.levels}
    for level in first.levels:
        other = theirs.get((level.tool, level.concurrency))
        if other is not None:
            name = f"{level.tool}, {level.concurrency} at once: useful tokens/s"
            found.numbers.append((name, level.useful_throughput, other.useful_throughput))
            if abs((level.prefix_hits or 0.0) - (other.prefix_hits or 0.0)) > 0.1:
                found.cautions.append(f"{name}: other shares of the prompts came from the prefix cache")
    if not found.numbers:
        found.against.append("no level of the one has the tool and concurrency of one of the other")
    found.cautions.append("one run of each: how much a speed varies from run to run is not known")


def text(found: Comparison) -> str:
    """What people read."""
    rows = [("comparable", "no" if found.against else "yes")]
    rows += [("", reason) for reason in found.against]
    rows += [("caution", caution) for caution in found.cautions]
    rows += [("differs", what) for what in found.subject]
    rows += [(name, f"{one:g} / {two:g}, difference {two - one:+g}") for name, one, two in found.numbers]
    if found.paired is not None:
        paired = found.paired
        said = "differ" if paired.p < SIGNIFICANT else "may be equal"
        rows.append(
            (
                "paired",
                f"both right {paired.both}, only the first {paired.only_first}, only the second {paired.only_second}, "
                f"neither {paired.neither}; McNemar's exact p {paired.p:.3g}: they {said}",
            )
        )
    return table(rows)
