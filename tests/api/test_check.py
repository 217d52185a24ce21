"""``dsv41 check``: every check holds against the talking model, and fails against a service with its fault."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys

import pytest

from api.proxy import between
from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.deploy.check import Options as CheckOptions
from vllm_ascend_dsv41.deploy.check import Service, basics, consistency, drafts, examine, thinking, tools
from vllm_ascend_dsv41.deploy.doctor.report import Status

pytestmark = pytest.mark.long  # one server for all of them


def test_the_talking_model_passes(server, capsys):
    """As the command line, with every check and its line."""
    assert main(["check", server.url, "--long-prompt", "900", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    states = {result["check"]: result["status"] for result in report["results"]}
    assert set(states.values()) == {"PASS"}, [r for r in report["results"] if r["status"] != "PASS"]
    assert len(states) == 22
    assert (report["model"], report["failed"]) == ("deepseek-v41", False)


def test_the_table(server, capsys):
    assert main(["check", server.url + "/v1/", "--long-prompt", "100", "--concurrency", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^PASS {2}efforts +low 25, high 50, xhigh 75, max 100, 37 37", out, re.M)
    assert re.search(r"^PASS {2}drafts +mean acceptance length [1-6]\.\d\d over \d+ drafts", out, re.M)
    assert "22 PASS, 0 WARN, 0 FAIL, 0 SKIP" in out


def chat(change):
    """Changes the message of every answer that is not streamed, and the deltas of those that are."""

    def apply(path, asked, status, text):
        if not path.endswith("/chat/completions") or status != 200:
            return status, text
        if not asked.get("stream"):
            answer = json.loads(text)
            change(asked, answer["choices"][0], answer["choices"][0]["message"])
            return status, json.dumps(answer)
        lines = []
        for line in text.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    change(asked, choice, choice["delta"])
                line = "data: " + json.dumps(event)
            lines.append(line)
        return status, "\n".join(lines) + "\n\n"

    return apply


def on_path(ending, answer):
    """Another answer to one path."""
    return lambda path, asked, status, text: answer(asked, text) if path.endswith(ending) else (status, text)


def setter(**fields):
    def change(asked, choice, message):
        for name, value in fields.items():
            (choice if name == "finish_reason" else message)[name] = value

    return change


def leak(asked, choice, message):
    if message.get("content"):
        message["content"] += "</think>"


def to_content(asked, choice, message):
    """A missing reasoning parser."""
    if message.get("reasoning"):
        message["content"] = message.pop("reasoning") + (message.get("content") or "")


def broken_arguments(asked, choice, message):
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = (call["function"].get("arguments") or "").replace("}", "")


def no_calls(asked, choice, message):
    if message.get("tool_calls"):
        message["tool_calls"], message["content"] = None, "<｜DSML｜ calls>"


COUNT = itertools.count()


def jitter(asked, choice, message):
    other = next(COUNT) % 2
    for entry in (choice.get("logprobs") or {}).get("content") or ():
        entry["logprob"] -= 0.5 * other


def slight(asked, choice, message):
    other = next(COUNT) % 2
    for entry in (choice.get("logprobs") or {}).get("content") or ():
        entry["logprob"] -= 0.01 * other


def impossible(asked, choice, message):
    for entry in (choice.get("logprobs") or {}).get("content") or ():
        entry["logprob"] = 0.7


def other_words(asked, choice, message):
    if next(COUNT) % 2 and message.get("content"):
        message["content"] = "something else"


def efforts(asked, text):
    return 200, text.replace("Reasoning Effort: 75", "Reasoning Effort: 60")


def effort_fault(path, asked, status, text):
    if status == 400 and "reasoning_effort" in text:
        return 500, '{"error": {"message": "Internal Server Error", "type": "x", "code": 500}}'
    return status, text


def any_effort(path, asked, status, text):
    fine = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
    fine["choices"] = [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}]
    return (200, json.dumps(fine)) if status == 400 else (status, text)


TEXT_ONLY = '{"error": {"message": "At most 0 image(s) may be provided in one prompt.", "type": "x", "code": 400}}'
FAULTY = {
    "health": (basics.health, on_path("/health", lambda asked, text: (503, "")), Status.FAIL),
    "no health": (basics.health, on_path("/health", lambda asked, text: (404, "")), Status.SKIP),
    "model": (
        basics.model,
        on_path("/models", lambda asked, text: (200, text.replace("deepseek-v41", "m"))),
        Status.FAIL,
    ),
    "version": (basics.version, on_path("/version", lambda asked, text: (404, "")), Status.SKIP),
    "no text": (basics.text, chat(setter(content=None, reasoning=None)), Status.FAIL),
    "thoughts only": (basics.text, chat(setter(content=None, finish_reason="length")), Status.WARN),
    "leak": (basics.text, chat(leak), Status.FAIL),
    "arithmetic": (basics.arithmetic, chat(setter(content="324")), Status.FAIL),
    "picture": (basics.image, chat(setter(content="The picture shows the digit 1.")), Status.FAIL),
    "text only": (basics.image, on_path("/completions", lambda asked, text: (400, TEXT_ONLY)), Status.SKIP),
    "schema": (basics.structured_output, chat(setter(content='{"city": 3}')), Status.FAIL),
    "no schema": (basics.structured_output, chat(setter(content="warm")), Status.FAIL),
    "no reasoning parser": (thinking.thinking_on, chat(to_content), Status.FAIL),
    "thoughts without end": (thinking.thinking_on, chat(setter(content=None)), Status.FAIL),
    "leaking thoughts": (thinking.thinking_on, chat(leak), Status.FAIL),
    "thinking all the same": (thinking.thinking_off, chat(setter(reasoning="hm")), Status.FAIL),
    "other efforts": (thinking.efforts, on_path("/detokenize", efforts), Status.WARN),
    "no efforts": (
        thinking.efforts,
        on_path("/detokenize", lambda asked, text: (200, '{"prompt": "Hello"}')),
        Status.FAIL,
    ),
    "hidden prompts": (thinking.efforts, on_path("/detokenize", lambda asked, text: (404, "")), Status.SKIP),
    "500 for efforts": (thinking.wrong_efforts, effort_fault, Status.FAIL),
    "any effort": (thinking.wrong_efforts, any_effort, Status.WARN),
    "no tool parser": (tools.tool_call, chat(no_calls), Status.FAIL),
    "broken arguments": (tools.tool_call, chat(broken_arguments), Status.FAIL),
    "finish reason": (tools.tool_call, chat(setter(finish_reason="stop")), Status.FAIL),
    "result unknown": (tools.tool_call, chat(lambda a, c, m: m.get("content") and m.update(content="no")), Status.FAIL),
    "broken stream of a call": (tools.tool_call_stream, chat(broken_arguments), Status.FAIL),
    "a call that was not wanted": (
        tools.tool_choice_none,
        chat(setter(content="<｜DSML｜ calls>")),
        Status.FAIL,
    ),
    "a stream that leaks": (consistency.streaming, chat(leak), Status.FAIL),
    "another text in the stream": (consistency.streaming, chat(other_words), Status.WARN),
    "no finish": (
        consistency.streaming,
        chat(lambda a, c, m: a.get("stream") and c.update(finish_reason=None)),
        Status.FAIL,
    ),
    "impossible": (consistency.logprobs, chat(impossible), Status.FAIL),
    "one log probability less": (
        consistency.logprobs,
        chat(lambda a, c, m: c["logprobs"]["content"].pop()),
        Status.FAIL,
    ),
    "jitter": (consistency.repeatability, chat(jitter), Status.FAIL),
    "slight jitter": (consistency.repeatability, chat(slight), Status.WARN),
    "another cache": (consistency.prefix_cache, chat(jitter), Status.FAIL),
    "no cache": (
        consistency.prefix_cache,
        lambda path, asked, status, text: (
            (404, "") if path == "/metrics" else (status, re.sub(r'"cached_tokens":\d+', '"cached_tokens":0', text))
        ),
        Status.SKIP,
    ),
    "nothing to a long prompt": (
        lambda service: consistency.long_prompt(service, 100),
        chat(setter(content=None)),
        Status.FAIL,
    ),
    "answers of others": (
        lambda service: consistency.concurrency(service, 4),
        chat(lambda a, c, m: m.get("content") and m.update(content=str(next(COUNT)))),
        Status.FAIL,
    ),
    "never quiet": (
        lambda service: consistency.ended_requests(service, 0.1),
        on_path("/metrics", lambda asked, text: (200, f'vllm:num_requests_running{{engine="0"}} {next(COUNT)}\n')),
        Status.WARN,
    ),
}


@pytest.mark.parametrize("what", FAULTY)
def test_each_check_can_fail(server, what):
    one, change, status = FAULTY[what]
    with between(server.url, change) as url:
        service = Service(url, "", 60, "deepseek-v41")
        try:
            result = one(service)
        finally:
            service.close()
    assert result.status is status, result
    if status in (Status.FAIL, Status.WARN):
        assert result.expected
        assert result.remedy


MADE, TAKEN = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"


@pytest.mark.parametrize(
    ("after", "status"),
    [
        ({}, Status.SKIP),
        ({"vllm:num_requests_running": 0.0}, Status.SKIP),
        ({MADE: 10.0, TAKEN: 5.0}, Status.WARN),  # none since before
        ({MADE: 20.0, TAKEN: 9.0}, Status.WARN),  # few
        ({MADE: 110.0, TAKEN: 5.0}, Status.FAIL),
        ({MADE: 110.0, TAKEN: 105.0}, Status.PASS),
        ({MADE: 110.0, TAKEN: 105.0, "dsv41:draft_stuck": 1.0}, Status.FAIL),
    ],
)
def test_drafts(after, status):
    assert drafts({MADE: 10.0, TAKEN: 5.0}, after).status is status


def test_a_service_that_ends_meanwhile(server):
    """Every check says so; none raises."""
    with between(server.url, lambda path, asked, status, text: (status, text)) as url:
        service = Service(url, "", 5, "deepseek-v41")
    results = list(examine(service, CheckOptions(words=10, requests=2)))
    service.close()
    assert len(results) == 22
    assert {r.status for r in results if r.check not in ("version", "drafts", "ended requests")} == {Status.FAIL}


@pytest.mark.parametrize(
    "answer",
    ["", '{"choices": [{"message": null}]}', "<html>"],
    ids=lambda text: text or "nothing",
)
def test_answers_that_are_no_answers(server, answer, capsys):
    with between(server.url, on_path("/chat/completions", lambda asked, text: (200, answer))) as url:
        assert main(["check", url, "--long-prompt", "10", "--concurrency", "2", "--timeout", "20"]) == 1
    assert " FAIL" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["http://127.0.0.1:9"], 3, "cannot be reached"),
        (["127.0.0.1:8000"], 2, "no URL of a service"),
        (["http://127.0.0.1:9", "--timeout", "0"], 2, "is not a positive number"),
        (["http://127.0.0.1:9", "--concurrency", "0"], 2, "is not a positive number"),
    ],
)
def test_exit_status(arguments, status, said):
    done = subprocess.run(
        [sys.executable, "-m", "vllm_ascend_dsv41.cli", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


def test_a_key_is_sent_and_never_shown(server, monkeypatch, capsys):
    """From the environment, with the line end that mounted secrets have; a service may repeat it in what it answers."""
    monkeypatch.setenv("DSV41_API_KEY", "secret-key\n")
    refusal, keys = '{"error": {"message": "secret-key is no key", "code": 401}}', []
    with between(server.url, on_path("/models", lambda asked, text: (401, refusal)), keys) as url:
        assert main(["check", url]) == 3
    said = capsys.readouterr()
    assert "401" in said.err
    assert "secret-key" not in said.err + said.out
    assert set(keys) == {"Bearer secret-key"}
    monkeypatch.setenv("DSV41_API_KEY", "secret-é")
    assert main(["check", server.url]) == 2
    assert main(["check", "http://me:secret@127.0.0.1:9"]) == 2
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize("models", ["<html>", "[]", '{"data": 3}'])
def test_lists_of_models_that_are_none(server, models, capsys):
    with between(server.url, on_path("/models", lambda asked, text: (200, models))) as url:
        assert main(["check", url]) == 3
    assert "Nothing was checked" in capsys.readouterr().err


def test_a_service_of_another_kind(server):
    """Without a list of models, and which takes no chat_template_kwargs: asked all the same."""

    def other(path, asked, status, text):
        if path.endswith("/models"):
            return 404, ""
        if asked and "chat_template_kwargs" in asked:
            return 400, '{"error": {"message": "Unknown parameter: chat_template_kwargs", "code": 400}}'
        return status, text

    with between(server.url, other) as url:
        service = Service(url, "", 60, "deepseek-v41")
        assert basics.model(service).status is Status.SKIP
        assert basics.arithmetic(service).status is Status.PASS
        service.close()
