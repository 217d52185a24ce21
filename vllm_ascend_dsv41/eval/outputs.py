"""What AISBench wrote: predictions, results and summary of one run."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .configs import MODEL
from .records import prompt_key, reply_key

#: Roles in AISBench's prompts.
ROLES = {"HUMAN": "user", "BOT": "assistant", "SYSTEM": "system", "TOOL": "tool"}


@dataclass(frozen=True)
class Question:
    """One question of one part of a data set: its place there, its prompt's name, and whether the answer was right, as
    AISBench judged it; None where it does not say."""

    part: str
    number: int
    key: str
    right: bool | None
    reply: str = ""  # names the answer that was judged; empty where there was none


@dataclass
class Outputs:
    """``cells``: the summary's numbers by row, None for ``-``; ``versions``: digests of prompts; ``failed``: questions
    of *_failed.jsonl, which are among the questions, and wrong; ``faults``: what could not be read."""

    questions: list[Question] = field(default_factory=list)
    cells: dict[str, float | None] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failed: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def right(self) -> int | None:
        """Right answers, where AISBench says of every question whether its answer is."""
        marks = [question.right for question in self.questions]
        return sum(map(bool, marks)) if marks and None not in marks else None


def last_error(log: Path) -> str:
    """The last exception that AISBench's log tells of; empty where there is none."""
    try:
        found = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", log.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return ""
    return f": {found[-1][:300]}" if found else ""


def read(work: Path) -> Outputs:
    """``work``: the folder given by --work-dir, which holds one run."""
    found = Outputs()
    runs = sorted(path for path in work.glob("*") if path.is_dir())
    if not runs:
        found.faults.append("AISBench wrote nothing")
        return found
    run = runs[-1]
    folder = run / "predictions" / MODEL
    for part in sorted({path.stem.removesuffix("_failed") for path in folder.glob("*.jsonl")}):
        _predictions(folder, part, run / "results" / MODEL / f"{part}.json", found)
    _summary(run / "summary", found)
    return found


def _lines(path: Path, found: Outputs) -> Iterator[dict[str, Any]]:
    # not splitlines(), for which U+2028 within a text ends a line, too
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n") if path.is_file() else []
    for number, line in enumerate(filter(None, lines), 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("id"), int):
            yield row
        else:
            found.faults.append(f"{path.name}: line {number} cannot be read")


def _key(prompt: Any) -> str:
    turns = prompt if isinstance(prompt, list) else [{"role": "HUMAN", "prompt": prompt}]
    return prompt_key([{"role": ROLES.get(str(t.get("role"))), "content": t.get("prompt")} for t in turns])


def _predictions(folder: Path, part: str, results: Path, found: Outputs) -> None:
    rows = {}
    for name, prompt in ((f"{part}.jsonl", "origin_prompt"), (f"{part}_failed.jsonl", "input")):
        for row in _lines(folder / name, found):
            said = row.get("prediction")
            reply = reply_key(said) if isinstance(said, str) and prompt != "input" else ""
            rows[int(row["id"])] = _key(row.get(prompt)), reply
            found.failed += prompt == "input"
    try:
        judged = json.loads(results.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found.faults.append(f"{part}: was not judged ({results.name} is missing or unreadable)")
        judged = {}
    marks = _marks(judged, len(rows))
    for number, (key, reply) in sorted(rows.items()):
        found.questions.append(Question(part, number, key, marks.get(number), reply))


def _marks(judged: dict[str, Any], count: int) -> dict[int, bool]:
    """By question; none unless they add up to the accuracy that is told. Details are a mapping from numbers, or a list
    whose entries end in their number."""
    details = judged.get("details")
    if isinstance(details, list):
        details = {str(one.get("example_abbr")).rpartition("_")[2]: one for one in details if isinstance(one, dict)}
    if not isinstance(details, dict):
        return {}
    marks: dict[int, bool] = {}
    for name, detail in details.items():
        if not name.isdecimal() or not isinstance(detail, dict):
            continue
        mark = detail.get("correct")
        if isinstance(mark, list):
            mark = mark[0] if len(mark) == 1 else None
        if mark is None and {"predictions", "references"} <= set(detail):  # AISBench's plain comparison keeps no mark
            mark = str(detail["predictions"]).strip() == str(detail["references"]).strip()
        if mark is not None:
            marks[int(name)] = bool(mark)
    accuracy = judged.get("accuracy", judged.get("pass@1"))
    adds_up = isinstance(accuracy, (int, float)) and abs(
        100 * sum(marks.values()) / max(1, count) - accuracy
    ) < 50 / max(1, count)  # less than half a question
    return marks if len(marks) == count and adds_up else {}


def _summary(folder: Path, found: Outputs) -> None:
    tables = sorted(folder.glob("*.csv"))
    if not tables:
        found.faults.append("there is no summary")
        return
    with tables[-1].open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            name = row.get("dataset") or "?"
            try:
                found.cells[name] = float(row.get(MODEL) or "-")
            except ValueError:
                found.cells[name] = None
            found.metrics[name] = row.get("metric") or "-"
            found.versions[name] = row.get("version") or "-"
