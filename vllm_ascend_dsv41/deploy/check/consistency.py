"""The same question must have the same answer: streamed, again, from the cache, beside others."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..doctor.report import Result, bad, good, skip, warn
from .basics import ARITHMETIC, leaked
from .service import Answer, Service, short

QUESTION = "Repeat: red river, two stones, one bird"
TIMES = 8
#: Of one token's log probability. BF16 steps of logits near 20 are 0.125.
NEAR = 0.25
CACHED_WORDS = 600  # of a prompt that fills several blocks of 128 tokens
BEGINNINGS = (QUESTION, "Hello", "Say hello.", "Count to five.", "Repeat: cat dog bird", "What is 17*19?")


def streaming(service: Service) -> Result:
    """Chunks add up to the answer, and tell usage and the finish reason."""
    name = "streaming"
    whole, parts = service.chat(QUESTION), service.stream(QUESTION)
    said = f"{parts.chunks} chunks: {parts.describe()}"
    if leaked(parts) or not parts.content or parts.finish is None or parts.usage is None:
        return bad(name, f"{said}, usage {parts.usage}", "text, then a finish reason and usage", SERVER_LOG)
    if parts.content != whole.content:
        found = f"{short(parts.content)}, else {short(whole.content)}"
        return warn(name, found, "the same text", "greedy answers vary: see repeatability")
    tokens = parts.usage.completion_tokens, whole.usage.completion_tokens
    if parts.finish != whole.finish or tokens[0] != tokens[1] or parts.chunks < min(2, tokens[0]):
        return bad(name, f"{said}, {tokens[0]} tokens", f"chunks of {whole.describe()}, {tokens[1]} tokens", SERVER_LOG)
    return good(name, f"{parts.chunks} chunks: {parts.describe()}")


SERVER_LOG = "read the server's log"


def logprobs(service: Service) -> Result:
    """One entry per token; probabilities are some; greedy takes the best."""
    name = "logprobs"
    answer = service.chat(QUESTION, logprobs=True, top_logprobs=5)
    if not answer.logprobs:
        return skip(name, "the service gives none")
    values = [entry.logprob for entry in answer.logprobs]
    tops = [max((top.logprob for top in entry.top_logprobs), default=-math.inf) for entry in answer.logprobs]
    if len(values) != answer.usage.completion_tokens:
        found = f"{len(values)} entries for {answer.usage.completion_tokens} tokens"
        return bad(name, found, "one per token", SERVER_LOG)
    wrong = [value for value, top in zip(values, tops, strict=True) if not -1e4 < value <= 1e-4 or value < top - 1e-3]
    if wrong:
        return bad(
            name, f"{wrong[:3]}", "log probabilities, of the best token", "NaN or wrong sampling: `dsv41 selftest`"
        )
    return good(name, f"{len(values)} tokens, mean {sum(values) / len(values):.3f}")


def _filler(service: Service, words: int) -> str:
    """Text of so many words, or of as many as surely fit, that no cache knows."""
    if service.longest:
        words = min(words, service.longest // 8)
    return f"Notice {secrets.token_hex(8)}. " + " ".join(f"{number} stones." for number in range(words // 2))


def _first(service: Service, messages: Any, **options: Any) -> tuple[str, float]:
    """First token and its log probability."""
    return _head(service.chat(messages, max_completion_tokens=1, logprobs=True, top_logprobs=1, **options))


def _head(answer: Answer) -> tuple[str, float]:
    """As ``_first``; of a service without log probabilities the text alone."""
    if not answer.logprobs:
        return answer.content, 0.0
    return answer.logprobs[0].token, answer.logprobs[0].logprob


def repeatability(service: Service) -> Result:
    """The same greedy prompt eight times."""
    name = "repeatability"
    firsts = [_first(service, QUESTION) for _ in range(TIMES)]
    tokens, values = {token for token, _ in firsts}, {value for _, value in firsts}
    spread = max(values) - min(values)
    found = f"{TIMES} times: {len(values)} log probabilities of {len(tokens)} first tokens"
    if len(tokens) > 1 or spread > NEAR:
        remedy = "state leaks between requests or steps: try without drafts, prefix caching, graphs, one by one"
        return bad(name, f"{found}, up to {spread:.3g} apart", "one", remedy)
    if len(values) > 1:
        return warn(
            name, f"{found}, up to {spread:.3g} apart", "one", "usual where kernels choose by batch; else see drafts"
        )
    return good(name, found)


def prefix_cache(service: Service) -> Result:
    """A prompt that nobody has asked, and the same again, from the prefix cache."""
    name = "prefix cache"
    messages = [
        {"role": "system", "content": _filler(service, CACHED_WORDS)},
        {"role": "user", "content": QUESTION},
    ]
    before = service.metrics().get("vllm:prefix_cache_hits_total", 0.0)
    options: dict[str, Any] = {"max_completion_tokens": 16, "logprobs": True, "top_logprobs": 1}
    cold = service.chat(messages, **options)
    for _ in range(3):  # data-parallel replicas have a cache each
        warm = service.chat(messages, **options)
        hits = getattr(getattr(warm.usage, "prompt_tokens_details", None), "cached_tokens", None) or 0
        if hits:
            break
    hits = hits or service.metrics().get("vllm:prefix_cache_hits_total", 0.0) - before
    (token, value), (again, other) = _head(cold), _head(warm)
    apart = abs(value - other)
    found = f"{cold.usage.prompt_tokens} tokens, {hits:.0f} from the cache, first log probability {apart:.3g} apart"
    if token != again or apart > NEAR:
        remedy = "the cache gives back other rows: serve with --no-enable-prefix-caching, and report it"
        return bad(name, found, "the same", remedy)
    if cold.content != warm.content:
        return warn(name, f"{found}, texts differ later", "the same text", "see repeatability")
    return good(name, found) if hits else skip(name, f"{found}: no cache, or the service does not tell")


def long_prompt(service: Service, words: int) -> Result:
    """Prefill of more than a step."""
    name = "long prompt"
    messages = [{"role": "system", "content": _filler(service, words)}, {"role": "user", "content": ARITHMETIC}]
    start = time.monotonic()
    answer = service.chat(messages, max_completion_tokens=32)
    taken = time.monotonic() - start
    if "323" not in answer.content or leaked(answer):
        remedy = "if short prompts are right: look at chunked prefill, --max-num-batched-tokens and the cache"
        return bad(name, f"{answer.usage.prompt_tokens} tokens, then 17*19: {answer.describe()}", "323", remedy)
    return good(name, f"{answer.usage.prompt_tokens} tokens in {taken:.1f} s: {answer.describe()}")


def concurrency(service: Service, requests: int) -> Result:
    """Requests at once, streamed and not, some of them ended early by the client: each as alone."""
    name = "concurrency"
    alone = {asked: service.chat(asked, max_completion_tokens=48).content for asked in BEGINNINGS}

    def one(number: int) -> tuple[str, Answer | None]:
        asked = BEGINNINGS[number % len(BEGINNINGS)]
        if number % 5 == 4:
            hang_up(service, asked)
            return asked, None
        ask = service.stream if number % 2 else service.chat
        return asked, ask(asked, max_completion_tokens=48)

    with ThreadPoolExecutor(requests) as pool:
        answers = list(pool.map(one, range(requests)))
    compared = [(asked, answer) for asked, answer in answers if answer is not None]
    other = [(asked, answer) for asked, answer in compared if answer.content != alone[asked]]
    found = f"{requests} at once, {requests - len(compared)} ended by the client"
    if not other:
        return good(name, found)
    asked, answer = other[0]
    text = f"{found}; {len(other)} differ: {short(asked)} {short(answer.content)}, alone {short(alone[asked])}"
    mixed = any(not answer.content or answer.content in alone.values() for _, answer in other)
    remedy = "near ties fall otherwise in other batches; empty, exchanged or many other answers are not that"
    return (bad if mixed or len(other) > len(compared) / 2 else warn)(name, text, "as alone", remedy)


def hang_up(service: Service, asked: str) -> None:
    """Ask for more than is ever read, and leave after the first bytes."""
    tokens = min(4096, (service.longest or 8192) // 2)
    body = {"model": service.model, "messages": [{"role": "user", "content": asked}], "stream": True}
    body |= {"max_tokens": tokens, "ignore_eos": True}
    with service.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        next(answer.iter_bytes(), None)


def ended_requests(service: Service, wait: float = 10.0) -> Result:
    """Nothing goes on behind clients that hang up."""
    name, gauge = "ended requests", "vllm:num_requests_running"
    before = service.metrics().get(gauge)
    if before is None:
        return skip(name, "the service has no /metrics")
    for _ in range(2):
        hang_up(service, QUESTION)
    deadline = time.monotonic() + wait
    while (running := service.metrics().get(gauge, math.inf)) > before and time.monotonic() < deadline:
        time.sleep(0.2)
    if running > before:
        found = f"{running:.0f} requests run {wait:.0f} s later, {before:.0f} did before"
        return warn(name, found, "as many", "others may use the service; else requests go on without their clients")
    return good(name, f"{running:.0f} run, as before")


CHECKS: tuple[Callable[[Service], Result], ...] = (streaming, logprobs, repeatability, prefix_cache)
