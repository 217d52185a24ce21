"""What AISBench hides: each of it, with the real AISBench, ends with the right verdict and exit status."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from eval.service import MODEL, Said, Service, serving
from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.eval import manifest

OK, DEGRADED, USAGE, INVALID = 0, 1, 2, 3


def run(url, data, tmp_path, *more, dataset="gsm8k"):
    """Exit status and manifest of ``dsv41 eval accuracy``."""
    out = tmp_path / "runs"
    arguments = ["eval", "accuracy", "--url", url, "--dataset", dataset, "--data", str(data), "--output", str(out)]
    status = main([*arguments, "--concurrency", "3", *more])
    (folder,) = [path for path in out.iterdir() if not path.name.startswith(".")]
    assert not list(out.glob(".*"))
    return status, manifest.read(folder), folder


def answers(*said):
    """One after the other, the last one again and again."""
    return Service(lambda body, number: said[min(number, len(said) - 1)])


CUT_IN_THOUGHT = Said(content=None, reasoning="so it must be 7", finish="length")


@pytest.mark.long
@pytest.mark.parametrize(
    ("said", "status", "reason", "value"),
    [
        ([Said()], OK, None, 100.0),
        # AISBench: 83.33, as if it had answered wrongly, and exit status 0
        ([Said(status=500), Said()], INVALID, "1 of 6 requests failed: out of luck", 83.3333),
        # AISBench: 100.00, since the last number of a thought is scored
        ([CUT_IN_THOUGHT], INVALID, "6 of 6 answers: unfinished thought", 0.0),
        ([Said(finish="length")], INVALID, "6 of 6 answers: cut", 100.0),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value)[:40],
)
def test_answers(said, status, reason, value, data, bench, tmp_path, capsys):
    with serving(answers(*said)) as url:
        found, made, folder = run(url, data, tmp_path)
    assert (found, made.verdict.status) == (status, status), made.reasons
    assert reason is None or any(reason in text for text in made.reasons), made.reasons
    assert (made.score.value if made.score else None) == value
    assert made.dataset.questions == 6
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == made.requests.asked
    assert {line["asked"]["chat_template_kwargs"]["reasoning_effort"] for line in lines} == {50}
    assert {line["asked"]["max_tokens"] for line in lines} == {3072}  # a quarter of the context is left to prompts
    assert made.verdict.value.upper() in capsys.readouterr().out


@pytest.mark.long
def test_a_share_may_be_allowed(data, bench, tmp_path):
    with serving(answers(CUT_IN_THOUGHT, Said())) as url:
        status, made, _ = run(url, data, tmp_path, "--most-unusable", "0.2")
    assert status == DEGRADED
    assert made.reasons == ["1 of 6 answers: unfinished thought"]
    assert made.score.right == 5  # AISBench counts 6
    assert made.score.low < 100 * 5 / 6 < made.score.high


@pytest.mark.long
def test_a_server_that_dies_in_the_middle(data, bench, tmp_path):
    service = Service(lambda body, number: Said())

    def answer(body, number):
        service.down = number >= 2
        return Said(status=None) if service.down else Said()

    service.answer = answer
    with serving(service) as url:
        status, made, _ = run(url, data, tmp_path)
    assert status == INVALID
    text = "\n".join(made.reasons)
    assert "requests failed" in text
    assert "/metrics no longer answers: the server ended" in text
    assert "no longer answers" in text
    assert made.score.right == 2  # AISBench: 33.33 and exit status 0


@pytest.mark.long
def test_a_server_that_was_started_anew_with_a_stuck_draft(data, bench, tmp_path):
    started = [100.0]
    page = "process_start_time_seconds {}\nvllm:spec_decode_num_drafts_total {}\n"

    def answer(body, number):
        started[0] = 200.0
        return Said()

    service = Service(answer)
    service.metrics = lambda: page.format(started[0], 10.0 + 30.0 * len(service.bodies))
    with serving(service) as url:
        status, made, _ = run(url, data, tmp_path)
    assert status == INVALID
    assert made.reasons[0] == "the server was started anew during the run"
    assert made.reasons[1].startswith("the draft is stuck: 0 tokens of 180 drafts")
    assert made.draft.mean_acceptance_length == 1.0


@pytest.mark.long
def test_limit_and_one_file_of_ones_own(bench, tmp_path):
    path = tmp_path / "my questions.jsonl"
    path.write_text("".join(json.dumps({"question": f"Say {n} {{x}}", "answer": "answer: 7"}) + "\n" for n in "abcd"))
    with serving(answers(Said(), Said(content="no"))) as url:
        status, made, folder = run(url, tmp_path, tmp_path, "--limit", "3", "--effort", "off", dataset=str(path))
    assert made.reasons == ["thinking was turned off and 3 answers have thoughts"]
    assert status == INVALID
    assert (made.score.right, made.score.questions, made.dataset.name) == (1, 3, "my-questions")
    rows = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    assert [row["right"] for row in rows].count(True) == 1
    assert made.effort.asked == "off"


def test_before_anything_is_asked(data, tmp_path, capsys):
    """No request is sent, and the manifest says why."""
    service = answers(Said())
    cases = [
        (("--model", "other"), "gsm8k", f"serves {MODEL}; asked was other"),
        ((), "gpqa", "gpqa_diamond.csv: not there"),
        (("--dataset-sha256", "0" * 64), "gsm8k", "expected 000"),
        (("--effort", "60"), "gsm8k", None),
    ]
    with serving(service) as url:
        for number, (more, dataset, reason) in enumerate(cases[:3]):
            status, made, folder = run(url, data, tmp_path / str(number), *more, dataset=dataset)
            assert status == INVALID
            assert any(reason in text for text in made.reasons), made.reasons
            assert (folder / "requests.jsonl").read_text() == ""
        service.effort = 50
        status, made, _ = run(url, data, tmp_path / "effort", *cases[3][0])
        assert (status, made.reasons) == (INVALID, ["the service encodes effort 50; asked was 60"])
    assert service.bodies == []
    status, made, _ = run(url, data, tmp_path / "down")
    assert status == INVALID
    assert "cannot be reached" in made.reasons[0]


def test_a_data_set_changed_by_one_character(data, tmp_path):
    file = data / "ais_bench" / "datasets" / "gsm8k" / "test.jsonl"
    with serving(answers(Said())) as url:
        _, made, _ = run("http://127.0.0.1:9", data, tmp_path / "one")
        digest = made.dataset.files[0].sha256
        file.write_text(file.read_text().replace("0 birds", "1 birds"))
        status, made, _ = run(url, data, tmp_path / "two", "--dataset-sha256", digest)
    assert status == INVALID
    assert digest in made.reasons[0]


BAD = {
    "empty line": '{"question": "a", "answer": "b"}\n\n{"question": "a", "answer": "b"}\n',
    "no answer": '{"question": "a"}\n',
    "no JSON": "question\n",
    "a list": "[1]\n",
    "nothing": "",
    "empty answer": '{"question": "a", "answer": ""}\n',
}


@pytest.mark.parametrize("what", BAD)
def test_files_that_hold_no_questions(what, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(BAD[what])
    with serving(answers(Said())) as url:
        status, made, _ = run(url, tmp_path, tmp_path, dataset=str(path))
    assert status == INVALID
    assert made.reasons[0].startswith(str(path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dataset", "gsm9k", "--url", "http://127.0.0.1:9"], "expected gsm8k, gpqa"),
        (["--dataset", "gsm8k", "--url", "127.0.0.1"], "no URL of a service"),
        (["--dataset", "gsm8k", "--url", "http://127.0.0.1:9", "--effort", "101"], "expected 1 to 100, or off"),
        (["--dataset", "gsm8k", "--url", "http://127.0.0.1:9", "--startup-report", "no.json"], "no startup report"),
    ],
)
def test_usage(arguments, said):
    command = [sys.executable, "-m", "vllm_ascend_dsv41.cli", "eval", "accuracy", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (USAGE, "")
    assert said in done.stderr
