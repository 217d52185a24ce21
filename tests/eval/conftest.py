"""AISBench, installed once, and a data set in its format."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from vllm_ascend_dsv41.eval import aisbench, datasets


@pytest.fixture(scope="session")
def bench():
    """Where DSV41_AISBENCH says, or in the user's cache."""
    return aisbench.setup()


def gsm8k(root, count=6, answer=7):
    """In GSM8K's format; every answer is the same number."""
    folder = root / "ais_bench" / "datasets" / "gsm8k"
    folder.mkdir(parents=True)
    rows = [{"question": f"{number} birds and some more are how many?", "answer": f"A guess.\n#### {answer}"}
            for number in range(count)]  # fmt: skip
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Six questions, as if no more had been published."""
    monkeypatch.setitem(datasets.KNOWN, "gsm8k", replace(datasets.KNOWN["gsm8k"], whole=6))
    return gsm8k(tmp_path / "data")
