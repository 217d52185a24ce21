"""A service that answers by a script, with the pages that a server of vLLM has."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "deepseek-v41"


@dataclass
class Said:
    """One answer. ``status`` other than 200: an error; None: the connection is closed without one."""

    content: str | None = "answer: 7"
    reasoning: str | None = "I count."
    finish: str | None = "stop"
    status: int | None = 200
    model: str = MODEL
    tokens: int = 5


@dataclass
class Service:
    """``answer``: of a request's body and its number, from 0 on; ``metrics``: the page, asked for anew each time."""

    answer: Callable[[dict[str, Any], int], Said]
    metrics: Callable[[], str] = lambda: 'process_start_time_seconds 100.0\nvllm:prompt_tokens_total{engine="0"} 5.0\n'
    root: str = "/data/model"
    effort: int | None = None  # in every prompt, whatever is asked
    bodies: list[dict[str, Any]] = field(default_factory=list)
    down: bool = False
    lock: Any = field(default_factory=threading.Lock)

    def page(self, path: str) -> tuple[int, str]:
        """Of a GET."""
        if path == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "x"}
            return 200, json.dumps({"object": "list", "data": [{**model, "root": self.root, "max_model_len": 4096}]})
        if path == "/metrics":
            return 200, self.metrics()
        return (200, '{"version": "0.30.0"}') if path == "/version" else (404, "")


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Its URL while it runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Nothing."""

        def _send(self, status: int, text: str, kind: str = "application/json") -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if service.down:
                self.close_connection = True
            else:
                self._send(*service.page(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if service.down:
                self.close_connection = True
                return
            if self.path == "/detokenize":
                effort = body["tokens"][0]
                self._send(200, json.dumps({"prompt": f"Reasoning Effort: {effort}" if effort else "Hello"}))
                return
            kwargs = body.get("chat_template_kwargs") or {}
            thinking = kwargs.get("thinking", True)
            ids = [service.effort or (kwargs.get("reasoning_effort", 50) if thinking else 0)]
            if body.get("return_token_ids"):
                self._send(200, json.dumps(whole(Said(), ids)))
                return
            with service.lock:
                number = len(service.bodies)
                service.bodies.append(body)
            said = service.answer(body, number)
            if said.status is None:
                self.close_connection = True
            elif said.status != 200:
                self._send(said.status, json.dumps({"error": {"message": "out of luck", "code": said.status}}))
            elif body.get("stream"):
                self._send(200, "".join(stream(said)), "text/event-stream")
            else:
                self._send(200, json.dumps(whole(said, ids)))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def usage(said: Said) -> dict[str, int]:
    """Of an answer."""
    return {"prompt_tokens": 7, "completion_tokens": said.tokens, "total_tokens": 7 + said.tokens}


def whole(said: Said, ids: list[int]) -> dict[str, Any]:
    """An answer that is not streamed."""
    message = {"role": "assistant", "content": said.content, "reasoning": said.reasoning}
    choice = {"index": 0, "finish_reason": said.finish, "message": message}
    head = {"id": "x", "object": "chat.completion", "created": 1, "model": said.model}
    return {**head, "choices": [choice], "usage": usage(said), "prompt_token_ids": ids}


def stream(said: Said) -> Iterator[str]:
    """Its events: one for each word; without a finish reason it ends there."""
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": said.model}
    parts = [("reasoning", said.reasoning or ""), ("content", said.content or "")]
    for name, text in parts:
        for word in text.split():
            choice = {"index": 0, "delta": {name: f"{word} "}, "finish_reason": None}
            yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
    if said.finish is not None:
        choice = {"index": 0, "delta": {}, "finish_reason": said.finish}
        yield f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage(said)})}\n\n"
        yield "data: [DONE]\n\n"
