"""A running OpenAI-compatible service, as the checks talk to it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

#: Unless a check says otherwise; None takes a key out again.
QUIET: dict[str, Any] = {"chat_template_kwargs": {"thinking": False}}


class AddressError(ValueError):
    """A URL or a key that cannot be one."""


class UnreachableError(ValueError):
    """Nothing could be checked: no service, or no model on it."""


@dataclass
class Answer:
    """One choice of a completion, from a stream or not."""

    content: str
    reasoning: str
    calls: list[dict[str, str]]  # {"name", "arguments"}, arguments as JSON text
    finish: str | None
    usage: Any = None
    logprobs: list[Any] = field(default_factory=list)
    chunks: int = 0  # that held some of it
    raw: Any = None

    def describe(self) -> str:
        """For a line of the report."""
        calls = ", ".join(f"{call['name']}({call['arguments']})" for call in self.calls)
        said = " ".join(filter(None, (short(self.content) if self.content else "", calls)))
        return f"{said or 'nothing'} ({self.finish})"


def short(text: str, most: int = 60) -> str:
    """Quoted, cut."""
    return repr(text if len(text) <= most else text[: most - 3] + "...")


def reasoning_of(message: Any) -> str:
    """vLLM calls it ``reasoning``, DeepSeek's own service and older versions ``reasoning_content``."""
    extra = message.model_extra or {}
    return str(extra.get("reasoning") or extra.get("reasoning_content") or "")


class Service:
    """``url`` with or without /v1. Raises AddressError."""

    def __init__(self, url: str, key: str, timeout: float, model: str | None = None) -> None:
        self.url = re.sub(r"/v1/?$", "", url.rstrip("/"))
        if not re.fullmatch(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[^\s?#]*)?", self.url):
            # not repeated: it may hold a password
            raise AddressError("no URL of a service; write for example http://127.0.0.1:8000 (a key: DSV41_API_KEY)")
        key = key.strip()
        if not (key.isascii() and key.isprintable()):
            raise AddressError("DSV41_API_KEY holds characters that no key has")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(base_url=self.url, timeout=timeout, headers=headers, follow_redirects=True)
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key=key or "none", timeout=timeout, max_retries=0)
        self._asked_for = model
        self._takes_template = True  # chat_template_kwargs, which others than vLLM may refuse

    def close(self) -> None:
        """End its connections."""
        self.http.close()
        self.client.close()

    @cached_property
    def models(self) -> list[Any]:
        """What /v1/models lists; nothing where the model was named and the service has no list."""
        try:
            return list(self.client.models.list())
        except NotFoundError:
            if self._asked_for is None:
                raise
            return []

    @property
    def model(self) -> str:
        """The model that is asked: the one that was named, or the first that is listed."""
        return self._asked_for or (str(self.models[0].id) if self.models else "")

    @property
    def longest(self) -> int | None:
        """``max_model_len``, where the service says it."""
        for model in self.models:
            length = (model.model_extra or {}).get("max_model_len")
            if model.id == self.model and isinstance(length, int):
                return length
        return None

    def _request(self, messages: Any, options: dict[str, Any]) -> dict[str, Any]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {**QUIET, **options.pop("extra_body", {})}
        if not self._takes_template:
            body.pop("chat_template_kwargs", None)
        body = {name: value for name, value in body.items() if value is not None}
        made = {"model": self.model, "messages": messages, "temperature": 0, "max_completion_tokens": 256, **options}
        if self.longest:  # short ones are for tests
            made["max_completion_tokens"] = min(made["max_completion_tokens"], self.longest // 2)
        return {**made, "extra_body": body}

    def _create(self, messages: Any, options: dict[str, Any], **more: Any) -> Any:
        try:
            return self.client.chat.completions.create(**self._request(messages, dict(options)), **more)
        except BadRequestError as error:
            if "chat_template_kwargs" not in str(error) or "effort" in str(error) or not self._takes_template:
                raise
        self._takes_template = False
        return self.client.chat.completions.create(**self._request(messages, dict(options)), **more)

    def chat(self, messages: Any, **options: Any) -> Answer:
        """One answer: greedy, without thinking, up to 256 tokens, unless ``options`` say otherwise."""
        made: ChatCompletion = self._create(messages, options)
        choice = made.choices[0]
        message = choice.message
        calls = [
            {"name": call.function.name, "arguments": call.function.arguments}
            for call in message.tool_calls or []
            if call.type == "function"
        ]
        logprobs = list(choice.logprobs.content or []) if choice.logprobs else []
        content = message.content or ""
        return Answer(content, reasoning_of(message), calls, choice.finish_reason, made.usage, logprobs, raw=made)

    def stream(self, messages: Any, **options: Any) -> Answer:
        """As ``chat``, put together from its chunks."""
        options = {"stream_options": {"include_usage": True}, **options}
        answer = Answer("", "", [], None)
        chunk: ChatCompletionChunk
        for chunk in self._create(messages, options, stream=True):
            answer.usage = chunk.usage or answer.usage
            for choice in chunk.choices:
                delta = choice.delta
                answer.chunks += bool(delta.content or delta.tool_calls or reasoning_of(delta))
                answer.content += delta.content or ""
                answer.reasoning += reasoning_of(delta)
                answer.finish = choice.finish_reason or answer.finish
                for part in delta.tool_calls or []:
                    while len(answer.calls) <= part.index:
                        answer.calls.append({"name": "", "arguments": ""})
                    if part.function is not None:
                        answer.calls[part.index]["name"] += part.function.name or ""
                        answer.calls[part.index]["arguments"] += part.function.arguments or ""
        return answer

    def metrics_page(self) -> str:
        """The text of /metrics; empty when there is no such page."""
        try:
            # a connection of its own: behind a balancer it may come from another process each time
            page = self.http.get("/metrics", headers={"Connection": "close"})
        except httpx.HTTPError:
            return ""
        return page.text if page.status_code == 200 else ""

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of /metrics, summed over their labels; empty when there is no such page."""
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([A-Za-z_:][\w:]*)(?:\{.*\})? (\S+)$", self.metrics_page(), re.M):
            try:
                found[name] = found.get(name, 0.0) + float(value)
            except ValueError:
                continue
        return found

    def prompt_of(self, messages: Any, **options: Any) -> str | None:
        """The text that the service made of a request, by vLLM's ``return_token_ids`` and /detokenize; None where the
        service has neither."""
        return self.decoded(self.prompt_ids_of(messages, **options))

    def prompt_ids_of(self, messages: Any, **options: Any) -> list[int]:
        """The token ids that the service made of a request; empty where it does not tell."""
        options["extra_body"] = {**options.get("extra_body", {}), "return_token_ids": True}
        try:
            answer = self.chat(messages, max_completion_tokens=1, **options)
        except BadRequestError as error:
            if "return_token_ids" in str(error):
                return []
            raise
        return list((answer.raw.model_extra or {}).get("prompt_token_ids") or ())

    def decoded(self, ids: list[int]) -> str | None:
        """Text of token ids, by /detokenize; None where there is none."""
        if not ids:
            return None
        page = self.http.post("/detokenize", json={"model": self.model, "tokens": ids})
        return str(page.json()["prompt"]) if page.status_code == 200 else None
