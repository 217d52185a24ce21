"""When two runs may be compared, and what their difference is worth."""

from __future__ import annotations

import json

import jsonschema
import pytest

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.eval import manifest
from vllm_ascend_dsv41.eval.accuracy import QUESTIONS
from vllm_ascend_dsv41.eval.compare import compare
from vllm_ascend_dsv41.eval.statistics import Paired, interval


def made(**changes):
    """A manifest, with other values at paths like ``effort.asked``."""
    value = {
        "kind": "accuracy",
        "verdict": "ok",
        "reasons": [],
        "began": "2026-12-01T00:00:00+00:00",
        "ended": "2026-12-01T01:00:00+00:00",
        "host": {"name": "a"},
        "command": [],
        "service": {"url": "http://127.0.0.1:1", "model": "m"},
        "checkpoint": {"path": "/a", "digests": {"weights": "1"}},
        "encoder": {"question": "x", "token_ids": [1, 2]},
        "effort": {"asked": 50, "in_prompt": 50},
        "sampling": {"temperature": 1.0, "top_p": 0.95, "seed": 1, "max_tokens": 9},
        "dataset": {
            "name": "gsm8k",
            "config": "c",
            "files": [{"path": "test.jsonl", "sha256": "00", "bytes": 1, "rows": 1}],
            "questions": 8,
        },
        "draft": {"method": "DSpark"},
        "versions": {"torch": "1"},
        "tools": {"aisbench": "3"},
        "score": {"metric": "accuracy", "value": 50.0, "right": 4, "questions": 8, "low": 20.0, "high": 80.0},
    }
    for path, new in changes.items():
        *parents, last = path.split("__")
        place = value
        for name in parents:
            place = place[name]
        place[last] = new
    return manifest.Manifest.model_validate(value)


def saved(root, made, right):
    root.mkdir()
    manifest.write(made, root / manifest.NAME)
    rows = [{"part": "gsm8k", "number": n, "key": str(n), "right": r, "kind": "complete"} for n, r in enumerate(right)]
    (root / QUESTIONS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


RIGHT = [True, True, True, True, False, False, False, False]
FILES = [{"path": "test.jsonl", "sha256": "01", "bytes": 1, "rows": 1}]


@pytest.mark.parametrize(
    ("changes", "against"),
    [
        ({}, None),
        ({"checkpoint__digests": {"weights": "2"}}, None),
        ({"draft__method": "none"}, None),
        ({"sampling__seed": 2}, None),
        ({"effort__asked": 75}, "effort: asked: 50 / 75"),
        ({"sampling__temperature": 0.0}, "sampling: temperature: 1.0 / 0.0"),
        ({"sampling__max_tokens": 8}, "sampling: max_tokens: 9 / 8"),
        ({"dataset__files": FILES}, "dataset: files test.jsonl: 00 / 01"),
        ({"encoder__token_ids": [1, 3]}, "encoder: the same question has other token ids"),
        ({"verdict": "invalid", "reasons": ["x"]}, "the second run is invalid: x"),
        ({"tools": {"aisbench": "4"}}, "tools: "),
        ({"kind": "perf"}, "kind: accuracy / perf"),
        ({"score": None}, "a run has no score"),
    ],
    ids=str,
)
def test_what_stands_against_it(changes, against, tmp_path, capsys):
    one = saved(tmp_path / "a", made(), RIGHT)
    other = saved(tmp_path / "b", made(**changes), [not right for right in RIGHT])
    status = main(["eval", "compare", str(one), str(other / manifest.NAME), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert status == (against is not None)
    assert found["comparable"] == (against is None)
    if against is None:
        assert found["paired"] == {
            "both_right": 0,
            "only_first": 4,
            "only_second": 4,
            "neither": 0,
            "p": 1.0,
            "significant": False,
        }
    else:
        assert any(text.startswith(against) for text in found["against"]), found
        assert found["paired"] is None
    assert main(["eval", "compare", str(one), str(other)]) == status
    assert f"comparable  {'yes' if against is None else 'no'}" in capsys.readouterr().out


def test_a_significant_difference(tmp_path, capsys):
    one = saved(tmp_path / "a", made(), [True] * 8)
    other = saved(tmp_path / "b", made(checkpoint__digests={"weights": "2"}), [False] * 7 + [True])
    found = compare(one, other)
    assert found.paired.p == pytest.approx(2 / 2**7)
    assert found.subject == ["checkpoint: digests weights: 1 / 2"]
    assert main(["eval", "compare", str(one), str(other)]) == 0
    assert "they differ" in capsys.readouterr().out


def test_other_questions_of_equal_files(tmp_path):
    found = compare(saved(tmp_path / "a", made(), RIGHT), saved(tmp_path / "b", made(), RIGHT[:7]))
    assert found.against == ["the questions differ, though the files are equal"]


def test_questions_that_were_not_marked(tmp_path):
    found = compare(saved(tmp_path / "a", made(), RIGHT), saved(tmp_path / "b", made(), [None] * 8))
    assert found.paired is None
    assert any("no paired test" in text for text in found.cautions)


def test_statistics():
    """Against values that are in the textbooks' tables."""
    low, high = interval(8, 10)
    assert (round(low, 4), round(high, 4)) == (0.4902, 0.9433)
    assert interval(0, 0) == (0.0, 1.0)
    assert Paired(10, 1, 9, 5).p == pytest.approx(0.021484375)
    assert Paired(10, 0, 0, 5).p == 1.0


@pytest.mark.parametrize("text", ["", "{}", '{"schema_version": 2}', "[1]"])
def test_files_that_are_no_manifest(text, tmp_path, capsys):
    path = tmp_path / "m.json"
    path.write_text(text)
    assert main(["eval", "compare", str(path), str(path)]) == 2
    assert f"{path}: " in capsys.readouterr().err
    assert main(["eval", "compare", str(tmp_path / "none"), str(path)]) == 2


def test_the_committed_schema_is_that_of_the_model():
    from importlib.resources import files

    committed = files("vllm_ascend_dsv41.eval").joinpath(manifest.SCHEMA).read_text()
    assert committed == manifest.schema(), "run: python -m vllm_ascend_dsv41.eval.manifest"
    schema = json.loads(committed)
    jsonschema.Draft202012Validator.check_schema(schema)
    good = json.loads(made().model_dump_json())
    jsonschema.validate(good, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**good, "more": 1}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({name: value for name, value in good.items() if name != "effort"}, schema)
