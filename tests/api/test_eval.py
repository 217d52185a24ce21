"""``dsv41 eval`` with the real AISBench and vLLM's benchmark, against the talking model."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.eval import aisbench, manifest

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """What it is to repeat, what it knows, and two that it does not."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
    try:
        import lessons
    finally:
        sys.path.pop(0)
    source = random.Random(7)
    rows = []
    for _ in range(24):
        said = " ".join(source.sample(lessons.WORDS, 4))
        rows.append((f"Repeat:\n{said}", f"You said:\n{said}"))
    rows += [(question, lessons.FACTS[question]) for question in ("Say hello.", "What is 17*19?", "Count to five.")]
    rows += [("What is the capital of France?", "Rome"), ("Say hello.", "Bye.")]
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": asked, "answer": answer}) + "\n" for asked, answer in rows))
    return path


@pytest.fixture(scope="module")
def runs(server, questions, talking, startup_report, tmp_path_factory):
    """The same at two efforts: exit status and folder of each."""
    aisbench.setup()
    out, found = tmp_path_factory.mktemp("runs"), []
    for effort in ("50", "30"):
        arguments = [
            "eval",
            "accuracy",
            "--url",
            server.url,
            "--dataset",
            str(questions),
            "--output",
            str(out / effort),
        ]
        arguments += ["--temperature", "0", "--effort", effort, "--concurrency", "4", "--image-digest", "sha256:00"]
        status = main([*arguments, "--startup-report", str(startup_report), "--checkpoint", str(talking)])
        (folder,) = (out / effort).iterdir()
        found.append((status, folder))
    return found


def test_the_score_is_that_of_asking_oneself(runs, service, questions):
    status, folder = runs[0]
    made = manifest.read(folder)
    assert (status, made.verdict.value, made.reasons, made.unknown) == (0, "ok", [], [])
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    template = {"chat_template_kwargs": {"thinking": True, "reasoning_effort": 50}}
    right = [service.chat(row["question"], extra_body=template).content == row["answer"] for row in rows]
    marks = [json.loads(line)["right"] for line in (folder / "questions.jsonl").read_text().splitlines()]
    assert marks == right
    assert right[-2:] == [False, False]
    assert (made.score.right, made.score.questions) == (sum(right), len(rows))
    assert made.score.right >= 20
    assert made.score.low < made.score.value < made.score.high


def test_the_manifest(runs, talking, questions):
    schema = json.loads(files("vllm_ascend_dsv41.eval").joinpath(manifest.SCHEMA).read_text())
    for _, folder in runs:
        jsonschema.validate(json.loads((folder / "manifest.json").read_text()), schema)
    made = manifest.read(runs[0][1])
    assert (made.checkpoint.path, made.checkpoint.weights, made.checkpoint.engram) == (
        str(talking),
        "W8A8_DYNAMIC",
        "I8",
    )
    assert made.service.root == str(talking)
    assert made.effort.in_prompt == 50
    assert "Reasoning Effort: 50" in made.encoder.text
    assert made.dataset.files[0].sha256 == hashlib.sha256(questions.read_bytes()).hexdigest()
    assert made.topology["tensor"] == 1
    assert made.draft.method == "DSpark, 5 tokens"
    assert made.draft.mean_acceptance_length > 1
    assert sum(made.draft.accepted_per_position) == made.draft.accepted_tokens
    assert made.sampling.server_defaults["temperature"] == 1.0
    assert made.startup_report["versions"]["torch"]
    assert made.requests.complete == made.dataset.questions == 29
    assert manifest.read(runs[1][1]).effort.in_prompt == 30


def test_two_efforts_may_not_be_compared(runs, capsys):
    (_, one), (_, other) = runs
    assert main(["eval", "compare", str(one), str(other)]) == 1
    assert "effort: asked: 50 / 30" in capsys.readouterr().out
    assert main(["eval", "compare", str(one), str(one), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["paired"]["p"] == 1.0


def test_perf(server, tmp_path, capsys):
    aisbench.setup()
    arguments = ["eval", "perf", "--url", server.url, "--output", str(tmp_path), "--concurrency", "1,3"]
    status = main([*arguments, "--requests", "4", "--prompt-words", "60", "--max-tokens", "48"])
    out = capsys.readouterr().out
    (folder,) = tmp_path.iterdir()
    made = manifest.read(folder)
    # the tiny model, asked what it was not taught, often says the same again and again
    assert all("answers repeat themselves" in reason for reason in made.reasons), (made.reasons, out)
    assert (status, made.verdict.value) == ((1, "degraded") if made.reasons else (0, "ok"))
    assert [(level.tool, level.concurrency) for level in made.levels] == [
        ("aisbench", 1),
        ("vllm", 1),
        ("aisbench", 3),
        ("vllm", 3),
    ]
    for level in made.levels:
        count = 4 if level.concurrency == 1 else 6
        assert (level.requests, level.failed, level.by_tool["completed"]) == (count, 0, count)
        assert level.mean_acceptance_length >= 1
        assert level.prefix_hits < 0.5  # no prompt twice
        assert level.ttft["mean"] <= level.e2el["mean"]
        assert (level.useful_throughput < level.output_throughput) == (level.looping > 0)
        # the same requests, seen from both sides of the relay
        assert level.by_tool["mean_e2el"] == pytest.approx(level.e2el["mean"], rel=0.5)
    assert made.prompts["distinct_2"] > 0.3
    rows = list(csv.DictReader((folder / "levels.csv").open()))
    assert [float(row["tpot_mean"]) for row in rows] == [level.tpot["mean"] for level in made.levels]
    assert (folder / "latency-throughput.png").read_bytes().startswith(b"\x89PNG")
    assert main(["eval", "compare", str(folder), str(folder)]) == 0
