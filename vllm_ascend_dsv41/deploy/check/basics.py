"""Is it there, and does it answer what it is asked: text, arithmetic, a picture, schemas."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import httpx
from openai import BadRequestError

from ..doctor.report import Result, bad, good, skip, warn
from .service import Answer, Service, short

DIGIT = "7"  # what seven.png shows
MARKUP = ("<think>", "</think>", "｜DSML｜", "<tool_result>")


def picture() -> str:
    """The bundled picture, as a data URL."""
    data = files(__package__).joinpath("seven.png").read_bytes()
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def leaked(answer: Answer) -> list[str]:
    """Markup that a parser should have taken out of the text."""
    return [mark for mark in MARKUP if mark in answer.content or mark in answer.reasoning]


def health(service: Service) -> Result:
    """GET /health."""
    name = "health"
    page = service.http.get("/health")
    if 400 <= page.status_code < 500:
        return skip(name, f"GET /health: {page.status_code}, not a server of vLLM")
    if page.status_code != 200:
        return bad(name, f"GET /health: {page.status_code}", "200", "read the server's log: an engine has ended")
    return good(name, "GET /health: 200")


def model(service: Service) -> Result:
    """The id under which the model is served."""
    ids = [one.id for one in service.models]
    if not ids:
        return skip("model", f"{service.model}; the service has no list")
    if service.model not in ids:
        return bad("model", f"/v1/models lists {ids}", service.model, "pass the id that is served by --model")
    length = f", {service.longest:,} tokens" if service.longest else ""
    return good("model", f"{service.model}{length}")


def version(service: Service) -> Result:
    """Of vLLM, for the record."""
    try:
        page = service.http.get("/version")
        said = page.json()["version"] if page.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        said = None
    return good("version", f"vLLM {said}") if said else skip("version", "the service does not tell it")


def text(service: Service) -> Result:
    """The guide's request, word for word: thinking is on, since nothing says otherwise."""
    name = "text"
    answer = service.chat("Who are you?", extra_body={"chat_template_kwargs": None})
    if leaked(answer):
        return bad(name, f"{answer.describe()} holds {leaked(answer)}", "text", PARSERS)
    if answer.content:
        return good(name, answer.describe())
    if answer.reasoning and answer.finish == "length":
        return warn(
            name,
            f"256 tokens of reasoning and no content: {short(answer.reasoning)}",
            "an answer",
            "nothing is broken: thinking is on by default; give a larger max_completion_tokens or turn it off",
        )
    return bad(name, answer.describe(), "an answer", "read the server's log; `dsv41 verify` checks the checkpoint")


PARSERS = "start with --tokenizer-mode, --reasoning-parser and --tool-call-parser deepseek_v41"


ARITHMETIC = "What is 17*19? Return only the integer."


def arithmetic(service: Service) -> Result:
    """vLLM's recipe asks this one: wrong weights rarely know it."""
    answer = service.chat(ARITHMETIC)
    if "323" in answer.content:
        return good("arithmetic", f"17*19: {answer.describe()}")
    remedy = "the model answers, and wrongly: `dsv41 verify --against` the official checkpoint, `dsv41 selftest`"
    return bad("arithmetic", f"17*19: {answer.describe()}", "323", remedy)


def image(service: Service) -> Result:
    """The guide's second request, with a bundled picture."""
    name = "image"
    content: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": picture()}},
        {"type": "text", "text": "Describe this image."},
    ]
    try:
        answer = service.chat([{"role": "user", "content": content}])
    except BadRequestError as error:
        if any(word in str(error) for word in ("At most 0 image", "text-only", "not a multimodal")):
            return skip(name, "the service takes text only (--language-model-only)")
        raise
    if DIGIT not in answer.content and "seven" not in answer.content.lower():
        remedy = "pictures arrive and are read wrongly: `dsv41 verify` looks for image tensors that were not rotated"
        return bad(name, answer.describe(), f"the digit {DIGIT}", remedy)
    return good(name, answer.describe())


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}


def structured_output(service: Service) -> Result:
    """An answer that a schema shapes."""
    name = "structured output"
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    answer = service.chat("Paris is warm. As JSON, please.", response_format=form)
    try:
        value = json.loads(answer.content)
        fits = set(value) == {"city", "warm"} and type(value["city"]) is str and type(value["warm"]) is bool
    except (ValueError, TypeError):
        fits = False
    if not fits:
        return bad(name, answer.describe(), "JSON of the schema", "see the server's log for its grammar backend")
    return good(name, answer.describe())


CHECKS: tuple[Callable[[Service], Result], ...] = (health, model, version, text, arithmetic, image, structured_output)
