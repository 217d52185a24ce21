"""Tool calls out, results in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..doctor.report import Result, bad, good, warn
from .basics import PARSERS, leaked
from .service import Answer, Service

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
QUESTION = 'What is the weather in <city id="1">Paris</city>?'  # in this form a tiny model can copy the name
TEMPERATURE = 18


def _fault(answer: Answer) -> str | None:
    """What is wrong with an answer that should call for Paris."""
    if leaked(answer):
        return f"{answer.describe()} holds {leaked(answer)}"
    if [call["name"] for call in answer.calls] != ["get_weather"]:
        return answer.describe()
    try:
        arguments = json.loads(answer.calls[0]["arguments"])
    except ValueError:
        return f"arguments are no JSON: {answer.describe()}"
    if not isinstance(arguments, dict) or "paris" not in str(arguments.get("city")).lower():
        return f"arguments: {answer.describe()}"
    return None if answer.finish == "tool_calls" else f"finish_reason {answer.finish!r}: {answer.describe()}"


def tool_call(service: Service) -> Result:
    """A call, its result, and an answer that knows the result."""
    name, asked = "tool call", {"role": "user", "content": QUESTION}
    called = service.chat([asked], tools=TOOLS, max_completion_tokens=1024)
    fault = _fault(called)
    if fault:
        return bad(name, fault, 'get_weather({"city": "Paris"})', f"{PARSERS}, and --enable-auto-tool-choice")
    message = called.raw.choices[0].message
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in message.tool_calls
    ]
    result = json.dumps({"temperature": TEMPERATURE})
    turns: list[dict[str, Any]] = [
        asked,
        {"role": "assistant", "content": message.content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": calls[0]["id"], "content": result},
    ]
    told = service.chat(turns, tools=TOOLS, max_completion_tokens=1024)
    if leaked(told) or str(TEMPERATURE) not in told.content:
        return bad(name, f"told {result}: {told.describe()}", f"an answer with {TEMPERATURE}", PARSERS)
    return good(name, f"{called.describe()}; told {result}: {told.describe()}")


def tool_call_stream(service: Service) -> Result:
    """The same call from a stream."""
    name = "tool call stream"
    whole = service.chat(QUESTION, tools=TOOLS, max_completion_tokens=1024)
    parts = service.stream(QUESTION, tools=TOOLS, max_completion_tokens=1024)
    fault = _fault(parts)
    if fault:
        return bad(name, fault, 'get_weather({"city": "Paris"})', PARSERS)
    if parts.calls != whole.calls:
        found = f"stream {parts.describe()}, else {whole.describe()}"
        return warn(name, found, "the same", "greedy answers vary: see repeatability")
    return good(name, f"{parts.describe()} in {parts.chunks} chunks")


def tool_choice_none(service: Service) -> Result:
    """``tool_choice: none``."""
    name = "tool_choice none"
    answer = service.chat(QUESTION, tools=TOOLS, tool_choice="none")
    if answer.calls or leaked(answer):
        return bad(name, answer.describe(), "no call, no markup", PARSERS)
    return good(name, answer.describe())


CHECKS: tuple[Callable[[Service], Result], ...] = (tool_call, tool_call_stream, tool_choice_none)
