"""A service between client and server that answers wrongly on purpose."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

#: path, request (None: GET), status and body of the answer -> status and body
Change = Callable[[str, dict[str, Any] | None, int, str], tuple[int, str]]


@contextmanager
def between(url: str, change: Change, keys: list[str | None] | None = None) -> Iterator[str]:
    """Its own URL while it runs; ``keys``: what clients send as Authorization is added."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Nothing."""

        def _answer(self, body: bytes | None) -> None:
            if keys is not None:
                keys.append(self.headers.get("Authorization"))
            headers = {"Content-Type": "application/json"}
            if body and b'"ignore_eos"' in body:  # a client that will hang up: here the whole answer is waited for
                body = json.dumps({**json.loads(body), "max_tokens": 2}).encode()
            answer = httpx.request(self.command, url + self.path, content=body, headers=headers, timeout=120)
            asked = json.loads(body) if body else None
            status, text = change(self.path, asked, answer.status_code, answer.text)
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", answer.headers.get("content-type", "text/plain"))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
