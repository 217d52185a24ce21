"""Data sets: what AISBench calls them, the files that must be there, and what they hold."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .aisbench import setup
from .errors import EvalError
from .manifest import File

CACHE = "AIS_BENCH_DATASETS_CACHE"  # AISBench's own variable: its paths begin there
JSONL_CONFIG = "dsv41_jsonl"
SUITE = "github.com/AISBench/benchmark says under ais_bench/benchmark/configs/datasets where each set comes from"


@dataclass(frozen=True)
class Known:
    """A data set of AISBench. ``asked``: files whose rows are questions; ``beside``: files that its loader also reads;
    both are patterns below ``folder``. ``whole``: rows of the published set."""

    config: str
    folder: str
    asked: tuple[str, ...]
    beside: tuple[str, ...] = ()
    whole: int | None = None
    every_row: bool = True  # each row of ``asked`` is a question


#: Chat prompts without examples; those of gpqa are the ones of vllm-ascend's own runs of this model.
KNOWN = {
    "gsm8k": Known("gsm8k_gen_0_shot_cot_chat_prompt", "gsm8k", ("test.jsonl",), ("train.jsonl",), 1319),
    "gpqa": Known("gpqa_gen_0_shot_cot_chat_prompt", "gpqa", ("gpqa_diamond.csv",), (), 198),
    "aime2025": Known("aime2025_gen_0_shot_chat_prompt", "aime2025", ("aime2025.jsonl",), (), 30),
    "ceval": Known(
        "ceval_gen_0_shot_cot_chat_prompt",
        "ceval/formal_ceval",
        ("val/*_val.csv",),
        ("dev/*_dev.csv", "test/*_test.csv"),
        1346,
    ),
    "mmlu_pro": Known("mmlu_pro_gen_0_shot_str", "mmlu_pro", ("**/test*.parquet",), ("**/validation*.parquet",), 12032),
    # its loader chooses among the rows by release
    "livecodebench": Known(
        "livecodebench_code_generate_lite_gen_0_shot_chat", "code_generation_lite", ("*.jsonl",), ("*.py",), None, False
    ),
}


@dataclass(frozen=True)
class Data:
    """Files that were found and read."""

    name: str
    config: str
    root: Path | None  # of AISBench's paths
    files: tuple[File, ...]
    questions: int | None  # None: only its loader knows
    whole: int | None


def find(name: str, root: Path | None) -> Data:
    """A data set by its name below ``root``, or a file of one's own. Raises EvalError."""
    if name.endswith(".jsonl"):
        path = Path(name).expanduser().absolute()
        check_jsonl(path)
        file = _file(path, path.parent)
        plain = re.sub(r"[^\w.-]+", "-", path.stem).removesuffix("_failed")  # AISBench's own ending
        return Data(plain or "set", JSONL_CONFIG, None, (file,), file.rows, None)
    if name not in KNOWN:
        raise EvalError(f"data set {name!r}: expected {', '.join(KNOWN)}, or a file NAME.jsonl")
    base = root or (Path(os.environ[CACHE]) if os.environ.get(CACHE) else None)
    if base is None:
        raise EvalError(f"{name}: where does its data lie? Pass --data DIR (or {CACHE}); {SUITE}")
    known, base = KNOWN[name], base.expanduser().absolute()
    folder = base / "ais_bench" / "datasets" / known.folder
    asked, beside = _matches(folder, known.asked), _matches(folder, known.beside)
    files = tuple(_file(path, folder) for path in (*asked, *beside))
    questions = sum(file.rows for file in files[: len(asked)]) if known.every_row else None
    return Data(name, known.config, base, files, questions, known.whole)


def _matches(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        there = sorted(path for path in folder.glob(pattern) if path.is_file())
        if not there:
            raise EvalError(f"{folder / pattern}: not there; {SUITE}")
        found += there
    return found


def _file(path: Path, folder: Path) -> File:
    try:
        data = path.read_bytes()
        rows = _rows(path, data)
    except OSError as error:
        raise EvalError(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise EvalError(f"{path}: cannot be read: {error}") from error
    digest = hashlib.sha256(data).hexdigest()
    return File(path=str(path.relative_to(folder)), sha256=digest, bytes=len(data), rows=rows)


def _rows(path: Path, data: bytes) -> int:
    if path.suffix == ".jsonl":
        return sum(1 for line in data.splitlines() if line.strip())
    if path.suffix == ".csv":
        return max(0, sum(1 for row in csv.reader(data.decode("utf-8-sig").splitlines(keepends=True)) if row) - 1)
    if path.suffix == ".parquet":
        python = str(setup().python)  # pyarrow is there
        program = "import sys, pyarrow.parquet as p; print(p.read_metadata(sys.argv[1]).num_rows)"
        done = subprocess.run([python, "-c", program, str(path)], capture_output=True, text=True)
        if done.returncode != 0:
            raise EvalError(f"{path}: no Parquet file: {(done.stderr.splitlines() or ['?'])[-1]}")
        return int(done.stdout)
    return 0


def check_jsonl(path: Path, keys: Sequence[str] = ("question", "answer")) -> list[dict[str, str]]:
    """Lines with text under each key. Raises EvalError with the first line that has not."""
    try:
        lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")  # U+2028 ends no line
    except (OSError, UnicodeDecodeError) as error:
        raise EvalError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise EvalError(
                f"{path}: line {number} is empty; expected {{{', '.join(f'{key!r}: ...' for key in keys)}}}"
            )
        try:
            row = json.loads(line)
        except ValueError as error:
            raise EvalError(f"{path}: line {number}: no JSON ({error})") from error
        row = row if isinstance(row, dict) else {}
        missing = [key for key in keys if not isinstance(row.get(key), str) or not row[key]]
        if missing:
            raise EvalError(f"{path}: line {number}: expected text under {' and '.join(map(repr, missing))}")
        broken = [key for key in keys if row[key].encode("utf-8", "ignore").decode() != row[key]]
        if broken:
            raise EvalError(f"{path}: line {number}: half a surrogate pair under {' and '.join(map(repr, broken))}")
        if "question" in keys and re.search(r"\{(question|answer)\}", row["question"]):
            raise EvalError(
                f"{path}: line {number}: AISBench fills {{question}} and {{answer}} in; write them otherwise"
            )
        rows.append(row)
    return rows
