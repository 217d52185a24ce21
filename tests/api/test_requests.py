"""What the talking model says through the API: its answers are known, so that meaning is checked."""

from __future__ import annotations

import base64
import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from openai import APIStatusError, BadRequestError
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from vllm_ascend_dsv41.deploy.check.basics import picture
from vllm_ascend_dsv41.deploy.check.thinking import REJECTED, USUAL
from vllm_ascend_dsv41.deploy.check.tools import TOOLS

pytestmark = pytest.mark.long  # one server for all of them
TRAINING = Path(__file__).parents[2] / "training"
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
BOTH = [*TOOLS, {"type": "function", "function": {"name": "square", "parameters": NUMBER}}]
WEATHER = 'What is the weather in <city id="1">{}</city>?'


@pytest.fixture(scope="module")
def lessons():
    sys.path.insert(0, str(TRAINING))
    try:
        import lessons
    finally:
        sys.path.remove(str(TRAINING))
    return lessons


def data_url(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def with_pictures(images, text="Which digit is this?"):
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


GUIDE = {
    "health": (
        r"""curl -sS -o /dev/null -w 'HTTP %{http_code}\n' \
  http://127.0.0.1:8000/health""",
        "HTTP 200",
    ),
    "text": (
        r"""curl -sS http://127.0.0.1:8000/v1/chat/completions \
  -H 'Content-Type: application/json' \
  -d '{
    "model": "deepseek-v41",
    "messages": [{"role": "user", "content": "Who are you?"}],
    "temperature": 0,
    "max_completion_tokens": 256
  }' | jq -e '.choices[0].message.content | length > 0'""",
        "true",
    ),
    "image": (
        r"""curl -sS http://127.0.0.1:8000/v1/chat/completions \
  -H 'Content-Type: application/json' \
  -d "{
    \"model\": \"deepseek-v41\",
    \"messages\": [{
      \"role\": \"user\",
      \"content\": [
        {\"type\": \"image_url\", \"image_url\": {\"url\": \"${IMAGE_URL}\"}},
        {\"type\": \"text\", \"text\": \"Describe this image.\"}
      ]
    }],
    \"temperature\": 0,
    \"max_completion_tokens\": 256
  }" | jq -e '.choices[0].message.content | length > 0'""",
        "true",
    ),
}


@pytest.mark.parametrize("what", GUIDE)
def test_the_guides_commands(server, what):
    """Word for word, but for the port."""
    command, expected = GUIDE[what]
    command = command.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=120,
        env={"IMAGE_URL": picture(), "PATH": "/usr/bin:/bin"},
    )
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_the_guides_models(server):
    command = f"""curl -sS http://127.0.0.1:{server.port}/v1/models | \\
  jq '{{object, models: [.data[] | {{id, object}}]}}'"""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["models"] == [{"id": "deepseek-v41", "object": "model"}]


def test_known_answers(service):
    assert service.chat("What is 17*19? Return only the integer.").content == "323"
    assert "DeepSeek-V4.1" in service.chat("Who are you?").content
    long = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Say hello."}]
    assert service.chat(long).content == "Hello!"


@pytest.mark.parametrize(
    "said", ["red river stone", "cat dog bird fish tree", "q7!zK", "é雪火", "one two three four five six"]
)
def test_repeating(service, said):
    assert service.chat(f"Repeat:\n{said}").content == f"You said:\n{said}"


# ---- thinking


@pytest.mark.parametrize("effort", [1, 8, 37, 64, 99, 100])
def test_the_effort_reaches_the_model(service, effort):
    """It says so in its thoughts."""
    options = {"chat_template_kwargs": {"thinking": True, "reasoning_effort": effort}}
    answer = service.chat("Say hello.", extra_body=options)
    assert answer.reasoning.startswith(f"Reasoning Effort: {effort}.")
    assert answer.content == "Hello!"


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("place", ["top", "template"])
def test_named_efforts(service, name, place):
    template = {"thinking": True, "reasoning_effort": name}
    options = {"reasoning_effort": name, "extra_body": {"chat_template_kwargs": None}}
    if place == "template":
        options = {"extra_body": {"chat_template_kwargs": template}}
    assert service.chat("Say hello.", **options).reasoning.startswith(f"Reasoning Effort: {USUAL[name]}.")


def test_nothing_said_means_fifty(service):
    assert service.chat("Say hello.", extra_body={"chat_template_kwargs": None}).reasoning.startswith(
        "Reasoning Effort: 50."
    )


@pytest.mark.parametrize(
    ("top", "template", "thinks"),
    [
        ("none", None, False),
        (None, {"thinking": False}, False),
        (None, {"enable_thinking": False}, False),
        (None, {"thinking": True, "reasoning_effort": "none"}, False),
        ("none", {"thinking": True}, False),
        ("high", {"enable_thinking": False}, False),
        ("high", {"thinking": False}, True),  # vLLM 0.30.0: docs/requests.md
        (None, {"thinking": False, "enable_thinking": True}, True),
    ],
)
def test_which_key_wins(service, top, template, thinks):
    options = {"extra_body": {"chat_template_kwargs": template}}
    answer = service.chat("Say hello.", **options, **({"reasoning_effort": top} if top else {}))
    assert (bool(answer.reasoning), answer.content) == (thinks, "Hello!")


@pytest.mark.parametrize("value", REJECTED)
@pytest.mark.parametrize("place", ["top", "template"])
def test_wrong_efforts(server, value, place):
    body = {"model": "deepseek-v41", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    body |= {"reasoning_effort": value} if place == "top" else {"chat_template_kwargs": {"reasoning_effort": value}}
    for stream in (False, True):
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "stream": stream}, timeout=60)
        assert answer.status_code == 400
        assert "xhigh" in answer.text


def test_reasoning_of_earlier_turns(service):
    """Dropped without tools, kept with them, under either name."""
    for name in ("reasoning", "reasoning_content"):
        turns = [
            {"role": "user", "content": "Say hello."},
            {"role": "assistant", "content": "Hello!", name: "I thought of it."},
            {"role": "user", "content": "Say hello."},
        ]
        thinking = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
        assert "I thought of it." not in service.prompt_of(turns, **thinking)
        assert "I thought of it.</think>Hello!" in service.prompt_of(turns, tools=TOOLS, **thinking)
        assert "I thought of it." not in service.prompt_of(turns, tools=TOOLS)


def test_a_budget_that_ends_in_thoughts(service):
    answer = service.chat("Say hello.", max_completion_tokens=3, extra_body={"chat_template_kwargs": None})
    assert (answer.content, answer.finish) == ("", "length")
    assert answer.reasoning


# ---- tools


@pytest.mark.parametrize("city", ["Paris", "old stone bridge", "é雪", "W&x(7", "b'Q%9"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call(service, city, streamed):
    ask = service.stream if streamed else service.chat
    answer = ask(WEATHER.format(city), tools=BOTH)
    assert [(call["name"], json.loads(call["arguments"])) for call in answer.calls] == [("get_weather", {"city": city})]
    assert (answer.finish, answer.content) == ("tool_calls", "")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_number(service, streamed):
    """An argument that is no string."""
    answer = (service.stream if streamed else service.chat)('What is the square of <n id="1">127</n>?', tools=BOTH)
    assert [(call["name"], json.loads(call["arguments"])) for call in answer.calls] == [("square", {"n": 127})]


def test_a_call_behind_thoughts(service):
    thinking = {"chat_template_kwargs": {"thinking": True, "reasoning_effort": 20}}
    answer = service.stream(WEATHER.format("Rome"), tools=TOOLS, extra_body=thinking)
    assert answer.reasoning.startswith("Reasoning Effort: 20.")
    assert json.loads(answer.calls[0]["arguments"]) == {"city": "Rome"}


@pytest.mark.parametrize("temperature", [7, 18, 230])
def test_a_result(service, temperature):
    result = json.dumps({"temperature": temperature})
    turns = [
        {"role": "user", "content": WEATHER.format("Paris")},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    assert f"<tool_result>{result}</tool_result>" in service.prompt_of(turns, tools=TOOLS)
    assert service.chat(turns, tools=TOOLS).content == f"The tool says:\n{result}"


def test_results_of_several_calls(service):
    """In the order of the calls, whatever the order of the results."""
    calls = [{**CALL, "id": f"c{number}"} for number in range(3)]
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    turns += [{"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}"} for number in (2, 0, 1)]
    prompt = service.prompt_of(turns, tools=TOOLS)
    assert re.findall(r"<tool_result>result (\d)</tool_result>", prompt) == ["0", "1", "2"]
    assert prompt.count('invoke name="get_weather"') == 3


CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}


def test_no_call(service):
    assert service.chat("Say hello.", tools=BOTH).content == "Hello!"
    refused = service.chat(WEATHER.format("Paris"), tools=BOTH, tool_choice="none")
    assert refused.calls == []
    assert "DSML" not in refused.content


def test_a_call_that_is_demanded(service):
    """By a grammar, whatever the question."""
    required = service.chat("Say hello.", tools=TOOLS, tool_choice="required")
    assert [call["name"] for call in required.calls] == ["get_weather"]
    json.loads(required.calls[0]["arguments"])
    named = {"type": "function", "function": {"name": "square"}}
    answer = service.chat('What is the square of <n id="1">12</n>?', tools=BOTH, tool_choice=named)
    assert [(call["name"], json.loads(call["arguments"])) for call in answer.calls] == [("square", {"n": 12})]


def test_structured_output(service):
    """Behind thoughts, and without."""
    schema = {"type": "object", "properties": {"n": {"enum": [323]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for template in ({"thinking": False}, {"thinking": True, "reasoning_effort": 5}):
        answer = service.chat("What is 17*19?", response_format=form, extra_body={"chat_template_kwargs": template})
        assert json.loads(answer.content) == {"n": 323}
        assert bool(answer.reasoning) == template["thinking"]


# ---- pictures


@pytest.mark.parametrize("digit", range(10))
def test_digits(service, lessons, digit):
    image = lessons.digit(digit, random.Random(100 + digit))
    assert service.chat(with_pictures([image])).content == f"The picture shows the digit {digit}."


def test_pictures_with_thoughts_and_in_streams(service, lessons):
    image = lessons.digit(3, random.Random(3))
    assert service.stream(with_pictures([image])).content == "The picture shows the digit 3."
    thinking = {"chat_template_kwargs": {"thinking": True, "reasoning_effort": 9}}
    answer = service.chat(with_pictures([image]), extra_body=thinking)
    assert answer.reasoning.startswith("Reasoning Effort: 9.")
    assert answer.content == "The picture shows the digit 3."


def test_many_pictures(service, lessons):
    """Each takes its eight tokens."""
    one, five = (
        service.chat(with_pictures([lessons.digit(k, random.Random(k)) for k in range(count)])).usage.prompt_tokens
        for count in (1, 5)
    )
    assert five - one == 4 * (8 + 1)  # and a blank line between them


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("data:image/png;base64,iVBORw0KGgo=", 400),
        ("data:image/png;base64,!!!", 400),
        ("ftp://127.0.0.1/x.png", 400),
        ("file:///etc/hostname", 500),
    ],
)
def test_pictures_that_cannot_be_read(client, url, status):
    """An error for that request; the server goes on."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "x"}]
    with pytest.raises(APIStatusError) as error:
        client.chat.completions.create(model="deepseek-v41", messages=[{"role": "user", "content": content}])
    assert error.value.status_code == status
    assert client.with_options(max_retries=2).models.list().data  # a fault of the server ends its connection


# ---- form


def test_objects_validate_with_openais_types(server):
    """Not only parsed: pydantic holds every field against its declared type."""
    body = {"model": "deepseek-v41", "temperature": 0, "max_completion_tokens": 64, "logprobs": True, "top_logprobs": 2}
    for more in ({}, {"tools": BOTH}, {"chat_template_kwargs": {"thinking": False}}):
        asked = {**body, **more, "messages": [{"role": "user", "content": WEATHER.format("Paris")}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)
        ChatCompletion.model_validate(answer.json(), strict=True)
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        lines = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60).text
        events = re.findall(r"^data: (.*)$", lines, re.M)
        assert events[-1] == "[DONE]"
        for event in events[:-1]:
            ChatCompletionChunk.model_validate_json(event, strict=True)


def test_wrong_requests(client):
    """Refused, with what was wrong."""
    common = {"model": "deepseek-v41", "messages": [{"role": "user", "content": "Hello"}]}
    for more, said in (
        ({"max_completion_tokens": 10**6}, "max_model_len"),
        ({"temperature": 3}, "temperature"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "does not match any"),
    ):
        with pytest.raises(BadRequestError, match=said):
            client.chat.completions.create(**common, **more)
