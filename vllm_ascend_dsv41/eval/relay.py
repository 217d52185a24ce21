"""A relay between a benchmark and the service: what was asked and how it was answered, request by request.

AISBench keeps neither finish reasons nor token counts of an accuracy run, and counts a request that failed as a wrong
answer. The relay sees both, whatever the benchmark makes of them. It also keeps the key: benchmarks write theirs into
their result folders.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web

from .records import Record, Reply, prompt_key

COMPLETIONS = "/v1/chat/completions"
BODY = 1 << 30  # bytes: pictures come as data URLs
#: Of the service's headers, those that describe the answer, not the connection to it.
KEPT = ("Content-Type", "Retry-After")


class Relay:
    """Listens on 127.0.0.1 and passes everything on to ``url``. Use as a context manager; ``on_record`` is called for
    each request to /v1/chat/completions that has ended, from the relay's thread."""

    def __init__(self, url: str, key: str, timeout: float, on_record: Callable[[Record], None]) -> None:
        self._upstream, self._timeout, self._on_record = url, timeout, on_record
        self._key, self._headers = key, {"Authorization": f"Bearer {key}"} if key else {}
        self._started: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self.port = 0

    def __enter__(self) -> Relay:
        self._thread.start()
        self.port = self._started.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    @property
    def url(self) -> str:
        """For the benchmark."""
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self) -> None:
        try:
            application = web.Application(client_max_size=BODY)
            application.router.add_route("*", "/{path:.*}", self._answer)
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            # benchmarks bound their own concurrency; a long answer in thought sends nothing for minutes when it is
            # not streamed, so that only the whole request has a limit
            limits = aiohttp.ClientTimeout(total=self._timeout, sock_connect=30)
            # shorter than servers keep idle connections (5 s): a request on one that was just closed would fail
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            self._session = aiohttp.ClientSession(timeout=limits, connector=connector, headers=self._headers)
            self._started.set_result(int(runner.addresses[0][1]))
        except BaseException as error:
            self._started.set_exception(error)
            raise
        async with self._session:
            await self._ended.wait()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path.rstrip("/") != COMPLETIONS or request.method != "POST":
            return await self._pass(request, body, None)
        record = _begin(body)
        try:
            return await self._pass(request, body, record)
        except (ConnectionError, asyncio.CancelledError):
            record.error = record.error or "the benchmark hung up"
            raise
        finally:
            record.latency = record.latency or time.monotonic() - record.started
            self._on_record(record)

    async def _pass(self, request: web.Request, body: bytes, record: Record | None) -> web.StreamResponse:
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        url = f"{self._upstream}{request.path_qs}"
        try:
            async with self._session.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                back = web.StreamResponse(status=answer.status, headers=_kept(answer))
                if record is None:
                    await back.prepare(request)
                    await back.write(await answer.read())
                    await back.write_eof()
                    return back
                record.status = answer.status
                if record.streamed and answer.status == 200:
                    return await _stream(request, back, answer, record)
                data = await answer.read()
                record.ended()
                if self._key and answer.status != 200:  # some services repeat the key that they refuse
                    data = data.replace(self._key.encode(), b"***")
        except (aiohttp.ClientError, TimeoutError) as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            if record is not None:
                record.error = text
            return web.json_response({"error": {"message": f"relay: {text}"}}, status=502)
        record.whole(data)
        await back.prepare(request)
        await back.write(data)
        await back.write_eof()
        return back


async def _stream(
    request: web.Request, back: web.StreamResponse, answer: aiohttp.ClientResponse, record: Record
) -> web.StreamResponse:
    """Each chunk as it comes; one that ends without a finish reason is cut off for the benchmark, too."""
    await back.prepare(request)
    reply = Reply()
    try:
        async for chunk in answer.content.iter_any():
            reply.add(chunk, time.monotonic() - record.started)
            await _write(back, chunk, reply)
    except _HungUp:
        record.error = "the benchmark hung up"
    except (aiohttp.ClientError, TimeoutError) as error:
        record.error = f"the stream broke: {type(error).__name__}: {error}".rstrip(": ")
        if request.transport is not None:
            request.transport.abort()
    record.ended()
    reply.end(record.latency)
    record.streamed_reply(reply)
    if not record.error:
        with contextlib.suppress(ConnectionError):
            await back.write_eof()
    return back


class _HungUp(Exception):
    """The benchmark left in the middle of an answer."""


async def _write(back: web.StreamResponse, chunk: bytes, reply: Reply) -> None:
    try:
        await back.write(chunk)
    except ConnectionError as error:
        if not reply.finish:  # behind the finish reason nobody needs to wait for the rest
            raise _HungUp from error


def _kept(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in KEPT if name in answer.headers}


def _begin(body: bytes) -> Record:
    try:
        asked: Any = json.loads(body)
    except ValueError:
        asked = {}
    asked = asked if isinstance(asked, dict) else {}
    return Record(key=prompt_key(asked.get("messages")), asked=asked, streamed=bool(asked.get("stream")))
