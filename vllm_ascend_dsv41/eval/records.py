"""What is kept of a request: not its text, but what the text was like."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from .text import looping

#: Options of a request that are kept: all but the messages.
MESSAGES = "messages"
END_OF_THOUGHT = "</think>"


def prompt_key(messages: Any) -> str:
    """Names a prompt: the texts of its messages, whatever else the request holds."""
    texts = [[m.get("role"), m.get("content")] for m in messages if isinstance(m, dict)] if messages else []
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:32]


def reply_key(text: str) -> str:
    """Names an answer: thought and content together, however they are joined."""
    return hashlib.sha256(text.replace(END_OF_THOUGHT, "").encode("utf-8", "replace")).hexdigest()[:32]


@dataclass
class Reply:
    """A streamed answer, put together; ``times``: seconds of every chunk that held a token, from the request."""

    content: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    model: str | None = None
    calls: int = 0
    done: bool = False
    fault: str = ""
    times: list[float] = field(default_factory=list)
    _pending: bytes = b""

    def add(self, chunk: bytes, when: float) -> None:
        """Some bytes of the stream."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            text = line.strip()
            if text == b"data: [DONE]":
                self.done = True
            elif text.startswith(b"data:"):
                self._event(text.removeprefix(b"data:"), when)

    def end(self, when: float) -> None:
        """The stream is over; its last line may lack its end."""
        self.add(b"\n", when)

    def _event(self, data: bytes, when: float) -> None:
        try:
            event = json.loads(data)
            if "error" in event:
                self.fault = str(event["error"])[:300]
                return
            self.usage, self.model = event.get("usage") or self.usage, event.get("model") or self.model
            for choice in event.get("choices") or ():
                self._choice(choice, when)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            self.fault = self.fault or f"an event cannot be read ({type(error).__name__}: {error})"

    def _choice(self, choice: dict[str, Any], when: float) -> None:
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
        self.content += content
        self.reasoning += reasoning
        self.calls += len(delta.get("tool_calls") or ())
        self.finish = choice.get("finish_reason") or self.finish
        if content or reasoning or delta.get("tool_calls"):
            self.times.append(when)


@dataclass
class Record:
    """One attempt at a request. Times in seconds; ``began`` is that of the clock, since 1970."""

    key: str
    asked: dict[str, Any]
    streamed: bool
    began: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    error: str = ""
    latency: float = 0.0
    finish: str | None = None
    model: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    completion_tokens: int = 0
    content: int = 0  # characters
    reasoning: int = 0
    calls: int = 0
    leaked: bool = False  # the mark behind a thought is in the content
    loops: float = 0.0  # share of the text that repeats what stands right before it
    text: str = ""  # of the content, for the diversity of answers; not written
    reply: str = ""  # names the answer; not written
    times: list[float] = field(default_factory=list)

    def ended(self) -> None:
        """The time that it took; before the answer is looked at."""
        self.latency = time.monotonic() - self.started

    def whole(self, data: bytes) -> None:
        """An answer that was not streamed."""
        try:
            answer = json.loads(data)
            if self.status != 200:
                message = answer.get("error", answer) if isinstance(answer, dict) else answer
                self.error = f"status {self.status}"
                said = str(message.get("message", message) if isinstance(message, dict) else message)
                self.error = said[:300] or self.error
                return
            choice = answer["choices"][0]
            message = choice["message"]
            reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
            self.finish = choice.get("finish_reason")
            self._said(message.get("content") or "", reasoning, len(message.get("tool_calls") or ()))
            self.model = answer.get("model")
            self._usage(answer.get("usage"))
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            text = data[:200].decode(errors="replace")
            self.error = f"the answer cannot be read ({type(error).__name__}: {error}): {text!r}"

    def streamed_reply(self, reply: Reply) -> None:
        """An answer that was."""
        self.finish, self.model, self.times = reply.finish, reply.model, reply.times
        self._said(reply.content, reply.reasoning, reply.calls)
        self._usage(reply.usage)
        if reply.fault:
            self.error = self.error or reply.fault
        elif not reply.finish:
            self.error = self.error or "the stream ended without a finish reason"

    def _said(self, content: str, reasoning: str, calls: int) -> None:
        self.content, self.reasoning, self.calls = len(content), len(reasoning), calls
        self.leaked = END_OF_THOUGHT in content
        self.text = content
        self.reply = reply_key(reasoning + content)
        self.loops = looping(reasoning + content)

    def _usage(self, usage: dict[str, Any] | None) -> None:
        if isinstance(usage, dict):
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.completion_tokens = int(usage.get("completion_tokens") or 0)
            details = usage.get("prompt_tokens_details")
            self.cached_tokens = details.get("cached_tokens") if isinstance(details, dict) else None

    @property
    def answered(self) -> bool:
        """Whether there is a whole answer, of whatever kind."""
        return self.status == 200 and not self.error and self.finish in ("stop", "length", "tool_calls")

    @property
    def kind(self) -> str:
        """``complete``, ``cut``, ``unfinished thought``, ``empty`` or ``failed``."""
        if not self.answered:
            return "failed"
        said = bool(self.content or self.calls)
        if self.finish == "length":
            return "cut" if said else "unfinished thought"
        return "complete" if said else "empty"

    @property
    def first(self) -> float | None:
        """Seconds to the first token of a stream."""
        return self.times[0] if self.times else None

    @property
    def per_token(self) -> float | None:
        """Seconds per output token behind the first."""
        if len(self.times) < 2 or self.completion_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.completion_tokens - 1)

    def as_json(self) -> dict[str, Any]:
        """One line of requests.jsonl."""
        asked = {name: value for name, value in self.asked.items() if name != MESSAGES}
        return {
            "prompt": self.key,
            "asked": asked,
            "began": round(self.began, 3),
            "latency_s": round(self.latency, 6),
            "first_token_s": None if self.first is None else round(self.first, 6),
            "per_output_token_s": None if self.per_token is None else round(self.per_token, 6),
            "kind": self.kind,
            "status": self.status,
            "error": self.error,
            "finish_reason": self.finish,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "content_characters": self.content,
            "reasoning_characters": self.reasoning,
            "tool_calls": self.calls,
            "end_of_thought_in_content": self.leaked,
            "looping": round(self.loops, 4),
        }
