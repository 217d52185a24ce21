"""Odd services, odd files and equal questions: no number is wrong for them, and no finished run is lost."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from eval.service import Said, Service, serving
from eval.test_compare import made
from eval.test_records import through
from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.deploy.check import Service as Client
from vllm_ascend_dsv41.eval import facts, manifest, outputs, run
from vllm_ascend_dsv41.eval.accuracy import AccuracyOptions, _judge_sent, _kinds
from vllm_ascend_dsv41.eval.configs import MODEL
from vllm_ascend_dsv41.eval.errors import EvalError
from vllm_ascend_dsv41.eval.outputs import Question
from vllm_ascend_dsv41.eval.perf import PerfOptions, _prompts, plot
from vllm_ascend_dsv41.eval.records import Record, prompt_key, reply_key
from vllm_ascend_dsv41.eval.verdict import Reasons


def record(text, finish="stop", key="same", status=200):
    one = Record(key, {}, False, status=status)
    message = {"content": text or None, "reasoning": "hm "}
    one.whole(json.dumps({"choices": [{"finish_reason": finish, "message": message}]}).encode())
    return one


def test_equal_questions_are_told_apart_by_their_answers():
    """In whatever order they were answered."""
    records = [record("7"), record("", "length"), record("8", "length"), record("x", status=500)]
    questions = [
        Question("q", 0, "same", True, reply_key("hm </think>7")),
        Question("q", 1, "same", False, reply_key("hm ")),
        Question("q", 2, "same", False),
        Question("q", 3, "same", False, reply_key("hm </think>8")),
    ]
    wanted = {("q", 0): "complete", ("q", 1): "unfinished thought", ("q", 2): "failed", ("q", 3): "cut"}
    for order in (records, records[::-1], records[2:] + records[:2]):
        assert _kinds(order, questions) == wanted
    assert _kinds(records[:1], questions)["q", 1] == "not asked"


def written(root, details, accuracy, predictions, failed=()):
    """AISBench's files of one part."""
    place = root / "20261201_000000"
    for name in ("predictions", "results"):
        (place / name / MODEL).mkdir(parents=True)
    (place / "summary").mkdir()
    lines = [
        {"id": n, "prediction": text, "origin_prompt": [{"role": "HUMAN", "prompt": f"q{n} \u2028"}]}
        for n, text in predictions
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (place / "predictions" / MODEL / "set.jsonl").write_text(text)
    if failed:
        rows = [{"id": n, "input": f"q{n} \u2028", "error_info": ""} for n in failed]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (place / "predictions" / MODEL / "set_failed.jsonl").write_text(text)
    result = {"accuracy": accuracy, "details": details}
    (place / "results" / MODEL / "set.json").write_text(json.dumps(result))
    (place / "summary" / "summary.csv").write_text(
        f"dataset,version,metric,mode,{MODEL}\nset,1,accuracy,gen,{accuracy}\n"
    )
    return outputs.read(root)


PREDICTIONS = [(2, "c"), (0, "a"), (1, "b")]  # in the order of completion


@pytest.mark.parametrize(
    "details",
    [
        {"0": {"correct": [True]}, "1": {"correct": [False]}, "2": {"correct": [True]}, "type": "GEN"},
        {str(n): {"predictions": p, "references": r} for n, (p, r) in enumerate([("a", "a "), ("b", "x"), ("c", "c")])},
        [{"example_abbr": f"set_test_{n}", "correct": [n != 1]} for n in range(3)],
    ],
)
def test_marks_of_every_kind(details, tmp_path):
    found = written(tmp_path, details, 200 / 3, PREDICTIONS)
    assert [question.right for question in found.questions] == [True, False, True]
    assert [question.number for question in found.questions] == [0, 1, 2]
    assert found.questions[1].key == prompt_key([{"role": "user", "content": "q1 \u2028"}])
    assert (found.right, found.cells, found.faults) == (2, {"set": pytest.approx(66.667, abs=0.01)}, [])


def test_the_last_error_of_a_log(tmp_path):
    log = tmp_path / "aisbench.log"
    assert outputs.last_error(log) == ""
    log.write_text("Traceback\n  raise ValueError: no\nValueError: first\nx\na.b.DataError: second\nError tasks: 1\n")
    assert outputs.last_error(log) == ": a.b.DataError: second"


def test_marks_that_do_not_add_up_are_not_used(tmp_path):
    found = written(tmp_path, {str(n): {"correct": [True]} for n in range(3)}, 66.7, PREDICTIONS)
    assert found.right is None


def test_failed_questions_are_questions(tmp_path):
    details = {str(n): {"correct": [n < 2]} for n in range(4)}
    found = written(tmp_path, details, 50.0, PREDICTIONS, failed=[3])
    assert (len(found.questions), found.failed, found.right) == (4, 1, 2)
    assert found.questions[3].key == prompt_key([{"role": "user", "content": "q3 \u2028"}])


def test_what_was_sent_is_what_the_manifest_says(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "one", "answer": "a"}\n{"question": "two", "answer": "b"}\n')
    options = AccuracyOptions(url="http://127.0.0.1:1", dataset=str(path))

    def sent(**changes):
        asked = {**options.body, "max_tokens": 9, **changes}
        return [Record(prompt_key([{"role": "user", "content": text}]), asked, False) for text in ("one", "two")]

    def judged(records):
        reasons = Reasons()
        _judge_sent(options, records, 9, reasons)
        return reasons.invalid

    assert judged(sent()) == []
    assert "2 requests had other options" in judged(sent(max_tokens=8))[0]
    assert "2 requests had other options" in judged(sent(chat_template_kwargs={"thinking": True}))[0]
    assert judged(sent()[:1])[0].startswith("1 questions were not sent")


@pytest.mark.parametrize("text", ["a {answer} b", "{question}", "\\ud800"])
def test_questions_that_would_not_arrive(text, tmp_path, capsys):
    path = tmp_path / "q.jsonl"
    path.write_text(f'{{"question": "{text}", "answer": "a"}}\n')
    with serving(Service(lambda body, number: Said())) as url:
        assert main(["eval", "accuracy", "--url", url, "--dataset", str(path), "--output", str(tmp_path / "o")]) == 3
    assert f"{path}: line 1: " in capsys.readouterr().out


def test_metrics_that_are_no_numbers():
    page = "process_start_time_seconds 1\nvllm:spec_decode_num_drafts_total NaN\nvllm:prompt_tokens_total +Inf\n"
    page += 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} NaN\n'
    with serving(Service(lambda body, number: Said(), metrics=lambda: page)) as url:
        service = Client(url, "", 5)
        found = facts.Metrics(service)
        service.close()
    assert found.values == {"process_start_time_seconds": 1.0}
    assert facts.draft_facts(found, found, None).drafts is None


def test_several_processes_behind_one_page():
    looks = iter(range(100))
    page = lambda: f"process_start_time_seconds {next(looks) % 2}\n"  # noqa: E731
    with serving(Service(lambda body, number: Said(), metrics=page)) as url:
        service = Client(url, "", 5)
        assert facts.Metrics(service).several
        service.close()


@pytest.mark.parametrize(
    "report",
    ["[]", '{"parallel": [1], "engram": [], "versions": {}}', '{"parallel": {}, "engram": null, "versions": {}}'],
)
def test_reports_that_are_none(report, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(report)
    with pytest.raises(EvalError, match="no startup report"):
        facts.startup_report(path)


@pytest.mark.parametrize("config", ["[]", '{"quantization_config": "w8a8"}', "{"])
def test_checkpoints_that_are_none(config, tmp_path):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(EvalError, match="no checkpoint can be read"):
        facts.checkpoint_facts(tmp_path)


def test_half_surrogates_in_a_manifest(tmp_path):
    one = made(command=["dsv41", "\udcff"], sampling__server_defaults={"stop": "\ud800"}, reasons=["雪"])
    manifest.write(one, tmp_path / "m.json")
    read = manifest.read(tmp_path / "m.json")
    assert (read.command[1], read.reasons) == ("?", ["雪"])


def test_a_plot_that_fails_loses_nothing(tmp_path, monkeypatch):
    unknown = []
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plot([], tmp_path / "a.png", "m", unknown)
    assert unknown[0].startswith("plot: ")


def test_a_model_of_any_name_is_plotted(tmp_path):
    unknown = []
    plot([], tmp_path / "a.png", "$m$^{", unknown)
    assert unknown == []
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_requests_of_others_are_noticed(tmp_path):
    """Those that ran while the run did."""
    count = [10.0]
    page = lambda: f"process_start_time_seconds 1\nvllm:request_success_total {count[0]}\n"  # noqa: E731
    service = Service(lambda body, number: Said(), metrics=page)
    with serving(service) as url:
        client, options = Client(url, "", 5), run.Options(url=url)
        before = run.look(client, options, Reasons())
        for grown, wanted in ((6.0, []), (7.0, ["1 requests of others"])):
            count[0], reasons = 10.0 + grown, Reasons()
            run.after(client, before, 5, reasons, [])
            assert [text[: len("1 requests of others")] for text in reasons.degraded] == wanted
        client.close()


def test_a_key_that_the_service_repeats(tmp_path):
    answer, record = through(Service(lambda body, number: Said(status=401)), key="out of luck")
    assert "out of luck" not in answer.text + json.dumps(record.as_json())
    assert record.error == "***"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--concurrency", "1,1"], "each once"),
        (["--tools", "wrk"], "expected aisbench or vllm"),
        (["--text", "/no/such.txt"], "No such file"),
        (["--text", __file__, "--requests", "400"], "words of text"),
    ],
)
def test_usage_of_perf(arguments, said, capsys, tmp_path):
    try:
        status = main(["eval", "perf", "--url", "http://127.0.0.1:9", "--output", str(tmp_path), *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_cannot_be_one(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    with serving(Service(lambda body, number: Said())) as url:
        arguments = ["eval", "accuracy", "--url", url, "--dataset", "gsm8k", "--data", str(tmp_path)]
        assert main([*arguments, "--output", str(file / "runs")]) == 2
    assert "name another folder by --output" in capsys.readouterr().err


def test_runs_of_the_same_second(tmp_path, monkeypatch):
    """Each has its own folder, whoever ends first; one that is interrupted keeps what it has, hidden."""
    monkeypatch.setattr(run.time, "strftime", lambda form: "20261201-000000")
    with run.Folder(tmp_path, "set") as one, run.Folder(tmp_path, "set") as two:
        two.add(record("a"))
        one.finish(made())
        two.finish(made())

    def interrupted():
        with run.Folder(tmp_path, "set") as three:
            three.add(record("b"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".set-20261201-000000.2.partial", "set-20261201-000000", "set-20261201-000000.1"]
    assert len((tmp_path / names[0] / run.REQUESTS).read_text().splitlines()) == 1


def test_the_package_is_text_enough_for_the_defaults():
    """Of the command, and of scripts/aisbench-perf.sh."""
    options = PerfOptions(url="http://127.0.0.1:1")
    prompts = _prompts(options)
    assert len(set(prompts.texts)) == options.total == 192
    script = (Path(__file__).parents[2] / "scripts/aisbench-perf.sh").read_text()
    assert f"LEVELS:-{','.join(map(str, options.concurrency))}}}" in script


def test_percentiles():
    assert facts.percentiles([]) == {}
    assert facts.percentiles([1.0, 3.0]) == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98, "max": 3.0}
    assert not math.isnan(facts.percentiles([0.0])["p99"])
