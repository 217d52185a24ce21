"""Thinking on and off, and the efforts that the service knows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from openai import APIStatusError

from ..doctor.report import Result, bad, good, skip, warn
from .basics import PARSERS, leaked
from .service import Service

QUESTION = "Hello"
NAMED = ("low", "high", "xhigh", "max")
#: What vLLM 0.30.0's encoder makes of them; DeepSeek's own service counts low, high and max as 50, 75 and 100.
USUAL = {"low": 25, "high": 50, "xhigh": 75, "max": 100}
REJECTED: tuple[Any, ...] = ("minimal", "medium", "turbo", 0, 101, 12.5)


def thinking_on(service: Service) -> Result:
    """Reasoning and content come apart."""
    name = "thinking on"
    options = {"chat_template_kwargs": {"thinking": True, "reasoning_effort": 50}}
    answer = service.chat("What is 17*19?", max_completion_tokens=4096, extra_body=options)
    if leaked(answer):
        return bad(name, f"{answer.describe()} holds {leaked(answer)}", "reasoning apart from content", PARSERS)
    if not answer.reasoning:
        return bad(name, f"no reasoning, content {answer.describe()}", "reasoning", PARSERS)
    if not answer.content:
        found = f"{len(answer.reasoning)} characters of reasoning, then {answer.finish}"
        remedy = "give a larger budget; if every answer is like that, the end of thinking is not found"
        return (warn if answer.finish == "length" else bad)(name, found, "content", remedy)
    return good(name, f"{len(answer.reasoning)} characters of reasoning, then {answer.describe()}")


def thinking_off(service: Service) -> Result:
    """By either key, and by the effort ``none``."""
    name = "thinking off"
    ways: dict[str, dict[str, Any]] = {
        "thinking: false": {"extra_body": {"chat_template_kwargs": {"thinking": False}}},
        "enable_thinking: false": {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        "reasoning_effort: none": {"reasoning_effort": "none", "extra_body": {"chat_template_kwargs": None}},
    }
    for way, options in ways.items():
        answer = service.chat(QUESTION, **options)
        if answer.reasoning or leaked(answer) or not answer.content:
            found = f"{way}: reasoning of {len(answer.reasoning)} characters, content {answer.describe()}"
            return bad(name, found, "content alone", PARSERS)
    return good(name, ", ".join(ways))


def _effort(service: Service, value: Any, top: bool) -> int | str | None:
    """The number that is in the prompt; None: none is."""
    options: dict[str, Any] = {"extra_body": {"chat_template_kwargs": {"thinking": True, "reasoning_effort": value}}}
    if top:
        options = {"reasoning_effort": value, "extra_body": {"chat_template_kwargs": None}}
    prompt = service.prompt_of(QUESTION, **options)
    if prompt is None:
        return "unknown"
    found = re.search(r"Reasoning Effort: (\d+)", prompt)
    return int(found[1]) if found else None


def efforts(service: Service) -> Result:
    """The mapping of the service, read from the prompts that it made."""
    name = "efforts"
    found = {value: _effort(service, value, top=False) for value in (*NAMED, 37)}
    if "unknown" in found.values():
        return skip(name, "the service does not show its prompts (vLLM's return_token_ids, /detokenize)")
    found["high, top level"] = _effort(service, "high", top=True)
    said = ", ".join(f"{key} {value}" for key, value in found.items())
    if found[37] != 37 or found["high, top level"] != found["high"] or None in found.values():
        remedy = "ask for efforts in chat_template_kwargs; another encoder than deepseek_v41 may be in use"
        return bad(name, said, "37 as it is, names alike in both places", remedy)
    if {key: found[key] for key in NAMED} != USUAL:
        usual = ", ".join(f"{key} {value}" for key, value in USUAL.items())
        return warn(name, said, f"{usual}, as vLLM 0.30.0 has them", "give integers: they mean the same everywhere")
    return good(name, said)


def wrong_efforts(service: Service) -> Result:
    """What the model does not know is refused with 400, and the allowed values are named."""
    name = "wrong efforts"
    said = []
    for value in REJECTED:
        options = {"chat_template_kwargs": {"thinking": True, "reasoning_effort": value}}
        try:
            service.chat(QUESTION, max_completion_tokens=1, extra_body=options)
        except APIStatusError as error:
            found = f"{value!r}: {error.status_code} {error.message[:120]}"
            if error.status_code >= 500:
                return bad(name, found, "400 with the allowed values", "update vLLM: clients see a fault of the server")
            if error.status_code != 400 or "xhigh" not in str(error):
                return warn(name, found, "400 with the allowed values", "clients are not told which efforts there are")
        else:
            said.append(repr(value))
    if said:
        remedy = "vLLM 0.30.0 refuses them; check what the service makes of them"
        return warn(name, f"taken: {', '.join(said)}", "400 with the allowed values", remedy)
    return good(name, f"400 for {', '.join(map(repr, REJECTED))}")


CHECKS: tuple[Callable[[Service], Result], ...] = (thinking_on, thinking_off, efforts, wrong_efforts)
