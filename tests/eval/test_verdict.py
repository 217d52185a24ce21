"""What makes a run degraded or invalid, rule by rule."""

from __future__ import annotations

import json

import pytest

from vllm_ascend_dsv41.deploy.check.drafts import ACCEPTED, DRAFTS, STUCK
from vllm_ascend_dsv41.eval.records import Record
from vllm_ascend_dsv41.eval.verdict import STARTED, Reasons, Verdict, account, judge_requests, judge_server

MODEL = "m"


def record(content="answer: 7", reasoning="I count.", finish="stop", status=200, model=MODEL):
    made = Record("key", {}, False, status=status)
    message = {"content": content, "reasoning": reasoning}
    answer = {"choices": [{"finish_reason": finish, "message": message}], "model": model, "usage": {}}
    made.whole(json.dumps(answer if status == 200 else {"error": {"message": "out of luck"}}).encode())
    return made


def judged(records, expected=None, thinking=True, most=0.02):
    reasons = Reasons()
    judge_requests(account(len(records) if expected is None else expected, records), MODEL, thinking, most, reasons)
    return reasons


GOOD = [record() for _ in range(99)]


@pytest.mark.parametrize(
    ("one", "verdict", "reason"),
    [
        (record(), Verdict.OK, None),
        (record(status=500), Verdict.INVALID, "1 of 100 requests failed: out of luck"),
        (record(finish=None), Verdict.INVALID, "1 of 100 requests failed"),
        (record(finish="abort"), Verdict.INVALID, "1 of 100 requests failed"),
        (record(finish="length"), Verdict.DEGRADED, "1 of 100 answers: cut"),
        (record(content=None, finish="length"), Verdict.DEGRADED, "1 of 100 answers: unfinished thought"),
        (record(content=""), Verdict.DEGRADED, "1 of 100 answers: empty"),
        (record(model="another"), Verdict.INVALID, "answers came from another; asked was m"),
        (record(content="7 </think> 7"), Verdict.DEGRADED, "1 answers hold </think>"),
        (record(content="so " * 99), Verdict.OK, None),  # one in a hundred may loop
    ],
)
def test_one_in_a_hundred(one, verdict, reason):
    found = judged([*GOOD, one])
    assert found.verdict is verdict
    texts = found.invalid + found.degraded
    assert not texts if reason is None else (len(texts) == 1 and texts[0].startswith(reason)), texts


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (record(finish="length"), "3 of 100 answers: cut"),
        (record(content=None, finish="length"), "3 of 100 answers: unfinished thought"),
        (record(content=None), "3 of 100 answers: empty"),
    ],
)
def test_more_than_the_share(kind, reason):
    found = judged([*GOOD[:97], kind, kind, kind])
    assert found.invalid == [reason]
    assert judged([*GOOD[:97], kind, kind, kind], most=0.03).verdict is Verdict.DEGRADED


def test_kinds_add_up_to_the_share():
    mixed = [record(finish="length"), record(content=None), record(content=None, finish="length")]
    assert len(judged([*GOOD[:97], *mixed]).invalid) == 3


def test_thoughts_that_were_asked_for_and_those_that_were_not():
    silent = [record(reasoning=None)] * 3
    assert judged(silent).invalid == ["thinking was asked for and no answer has thoughts"]
    assert judged(silent, thinking=False).verdict is Verdict.OK
    assert judged([*silent, record()], thinking=False).invalid == [
        "thinking was turned off and 1 answers have thoughts"
    ]
    assert judged(silent, thinking=None).verdict is Verdict.OK


def test_loops_and_counts():
    loop = record(content="so it is " * 40)
    assert judged([*GOOD[:80], *[loop] * 6]).degraded == ["6 of 86 answers repeat themselves"]
    assert judged(GOOD, expected=100).invalid == ["1 of 100 requests were never sent"]
    assert judged(GOOD, expected=98).invalid == ["99 requests were sent for 98 questions"]
    assert judged([], expected=5).invalid == ["5 of 5 requests were never sent"]


BEFORE = {STARTED: 1.0, DRAFTS: 10.0, ACCEPTED: 5.0, "vllm:prompt_tokens_total": 5.0, "vllm:num_requests_running": 3.0}


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (BEFORE, Verdict.OK),
        ({**BEFORE, "vllm:num_requests_running": 0.0}, Verdict.OK),  # a gauge
        ({**BEFORE, DRAFTS: 110.0, ACCEPTED: 60.0}, Verdict.OK),
        ({**BEFORE, DRAFTS: 110.0}, Verdict.DEGRADED),
        ({**BEFORE, STUCK: 1.0}, Verdict.DEGRADED),
        ({**BEFORE, STARTED: 2.0}, Verdict.INVALID),
        ({**BEFORE, "vllm:prompt_tokens_total": 4.0}, Verdict.INVALID),
        ({}, Verdict.INVALID),
    ],
)
def test_the_server(after, verdict):
    reasons = Reasons()
    judge_server(BEFORE, after, reasons)
    assert reasons.verdict is verdict
    assert {v: v.status for v in Verdict} == {Verdict.OK: 0, Verdict.DEGRADED: 1, Verdict.INVALID: 3}
