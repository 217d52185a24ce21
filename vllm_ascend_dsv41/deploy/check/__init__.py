"""``dsv41 check URL``: a running service of DeepSeek-V4.1, ours or another, seen from a client."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from openai import APIStatusError, APITimeoutError, OpenAIError

from ..doctor.report import Result, bad, failed, skip, text
from . import basics, consistency, thinking, tools
from .drafts import drafts
from .service import AddressError, Service, UnreachableError

__all__ = ["AddressError", "Options", "Service", "UnreachableError", "check", "examine"]

SCHEMA = 1
OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3


@dataclass(frozen=True)
class Options:
    """What is asked of a service."""

    model: str | None = None
    key: str = ""
    timeout: float = 300.0
    words: int = 6000
    requests: int = 8


def examine(service: Service, options: Options) -> Iterator[Result]:
    """One result after the other. Behind two requests that were not answered in time no more are asked."""
    before, late = service.metrics(), 0
    asked: list[Callable[[Service], Result]] = [
        *(*basics.CHECKS, *thinking.CHECKS, *tools.CHECKS, *consistency.CHECKS),
        partial(consistency.long_prompt, words=options.words),
        partial(consistency.concurrency, requests=options.requests),
        consistency.ended_requests,
    ]
    for one in asked:
        if late < 2:
            result, in_time = _guarded(one, service)
            late += not in_time
            yield result
        else:
            yield skip(_name(one), "not asked: two requests were not answered in time")
    yield drafts(before, service.metrics())


def _name(one: Any) -> str:
    function = one.func if isinstance(one, partial) else one
    return str(function.__name__).replace("_", " ")


def _guarded(one: Callable[[Service], Result], service: Service) -> tuple[Result, bool]:
    """A request that fails is the result of its check; whether it was answered in time."""
    name = _name(one)
    try:
        return one(service), True
    except (APITimeoutError, httpx.TimeoutException):
        found = "no answer in time"
        return bad(name, found, "an answer", "is the server busy, or does an engine stand still? See its log"), False
    except APIStatusError as error:
        found = f"{error.status_code}: {error.message[:200]}"
        remedy = "a 4xx names what the service does not take; a 5xx is in its log"
        return bad(name, found, "an answer", remedy), True
    except (OpenAIError, httpx.HTTPError) as error:
        found = f"{type(error).__name__}: {error}"
        return bad(name, found, "an answer", "the server ended or is too slow: see its log"), True
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        found = f"the answer cannot be read ({type(error).__name__}: {error})"
        return bad(name, found, "an answer as OpenAI's", "is this a service of DeepSeek-V4.1?"), True


def check(url: str, options: Options, as_json: bool) -> int:
    """Run every check and print lines, or JSON. Returns 0: all hold, 1: something does not, 2: no URL or key, 3:
    nothing could be checked."""
    results: list[Result] = []
    try:
        service = Service(url, options.key, options.timeout, options.model)
    except AddressError as error:
        print(f"dsv41: error: {error}", file=sys.stderr)
        return USAGE
    try:
        _reach(service)
        for result in examine(service, options):
            results.append(result)
            if not as_json:
                print(f"  {result.status.value} {result.check}", file=sys.stderr, flush=True)
    except UnreachableError as error:
        remedy = "is the server ready, and URL and key (DSV41_API_KEY) right? Nothing was checked"
        print(f"dsv41: error: {service.url}: {error}; {remedy}", file=sys.stderr)
        return UNREACHABLE
    finally:
        service.close()
    _say(service, results, as_json)
    return FAILED if failed(results) else OK


def _reach(service: Service) -> None:
    """Raises UnreachableError."""
    try:
        models = service.models
    except APIStatusError as error:  # not its text, which may repeat the key
        raise UnreachableError(f"/v1/models: {error.status_code}") from error
    except (OpenAIError, httpx.HTTPError) as error:
        raise UnreachableError(f"cannot be reached ({error.__cause__ or error})") from error
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise UnreachableError("/v1/models: no list of models") from error
    if not models and not service.model:
        raise UnreachableError("/v1/models lists no model")


def _say(service: Service, results: Sequence[Result], as_json: bool) -> None:
    if as_json:
        report = {
            "schema": SCHEMA,
            "url": service.url,
            "model": service.model,
            "failed": failed(results),
            "results": [result.as_json() for result in results],
        }
        print(json.dumps(report, indent=1))
    else:
        print(text(results, f"{service.url} {service.model}".strip()).removeprefix("node "))
