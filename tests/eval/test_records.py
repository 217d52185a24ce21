"""The relay's account of a request, streamed or not, whatever the service does."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from eval.service import MODEL, Said, Service, serving, stream
from vllm_ascend_dsv41.eval.records import Reply, prompt_key
from vllm_ascend_dsv41.eval.relay import Relay

MESSAGES = [{"role": "user", "content": "Hello"}]


def through(service, body=None, timeout=20.0, key=""):
    """The benchmark's answer and the relay's record."""
    records = []
    with serving(service) as url, Relay(url, key, timeout, records.append) as relay:
        asked = {"model": MODEL, "messages": MESSAGES, **(body or {})}
        try:
            answer = httpx.post(f"{relay.url}/v1/chat/completions", json=asked, timeout=30)
        except httpx.HTTPError as error:
            answer = error
    (record,) = records
    return answer, record


KINDS = {
    "complete": Said(),
    "cut": Said(finish="length"),
    "unfinished thought": Said(content=None, finish="length"),
    "empty": Said(content=None),
    "failed": Said(status=500),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, streamed):
    said = KINDS[kind]
    answer, record = through(Service(lambda body, number: said), {"stream": streamed, "max_tokens": 9})
    assert record.kind == kind, record
    assert answer.status_code == record.status == said.status
    assert record.as_json()["asked"] == {"model": MODEL, "stream": streamed, "max_tokens": 9}
    assert "Hello" not in json.dumps(record.as_json())
    if kind == "failed":
        assert record.error == "out of luck"
        return
    assert (record.prompt_tokens, record.completion_tokens, record.model) == (7, 5, MODEL)
    assert (record.content > 0, record.reasoning > 0) == (said.content is not None, True)
    assert (record.first is not None) == streamed


def test_the_answer_passes_unchanged():
    said = Said(content="雪 </think> 火")
    plain, record = through(Service(lambda body, number: said))
    assert plain.json()["choices"][0]["message"]["content"] == said.content
    assert record.leaked
    streamed, _ = through(Service(lambda body, number: said), {"stream": True})
    assert streamed.text == "".join(stream(said))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_service_that_hangs_up(streamed):
    answer, record = through(Service(lambda body, number: Said(status=None)), {"stream": streamed})
    assert answer.status_code == 502
    assert record.kind == "failed"
    assert "ServerDisconnectedError" in record.error


def test_a_stream_without_an_end():
    _, record = through(Service(lambda body, number: Said(finish=None)), {"stream": True})
    assert (record.kind, record.error) == ("failed", "the stream ended without a finish reason")


def test_a_service_that_is_not_there():
    records = []
    with Relay("http://127.0.0.1:9", "", 5, records.append) as relay:
        answer = httpx.post(f"{relay.url}/v1/chat/completions", json={"messages": MESSAGES})
    assert answer.status_code == 502
    assert "ClientConnectorError" in records[0].error


def test_a_service_that_is_too_slow():
    async def slow(reader, writer):
        await asyncio.sleep(10)

    async def run():
        server = await asyncio.start_server(slow, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        records = []
        with Relay(f"http://127.0.0.1:{port}", "", 0.3, records.append) as relay:
            async with httpx.AsyncClient() as client:
                answer = await client.post(f"{relay.url}/v1/chat/completions", json={"messages": MESSAGES})
        server.close()
        return answer, records[0]

    answer, record = asyncio.run(run())
    assert answer.status_code == 502
    assert "TimeoutError" in record.error


def test_a_benchmark_that_hangs_up_in_the_middle():
    """Its requests are accounted for all the same."""

    async def drip(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        try:
            for event in list(stream(Said(content="a " * 200)))[:-3]:
                writer.write(event.encode())
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass
        writer.close()

    async def run():
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        records = []
        with Relay(f"http://127.0.0.1:{port}", "", 20, records.append) as relay:
            body = {"messages": MESSAGES, "stream": True}
            url = f"{relay.url}/v1/chat/completions"
            async with httpx.AsyncClient() as client, client.stream("POST", url, json=body) as answer:
                async for _ in answer.aiter_bytes():
                    break
            for _ in range(100):
                if records:
                    break
                await asyncio.sleep(0.05)
        server.close()
        return records

    (record,) = asyncio.run(run())
    assert (record.kind, record.error) == ("failed", "the benchmark hung up")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10**6])
def test_streams_cut_anywhere(size):
    data = "".join(stream(Said(content="one two 雪", tokens=3))).encode()
    reply = Reply()
    for at in range(0, len(data), size):
        reply.add(data[at : at + size], at / 1000)
    assert (reply.content, reply.reasoning, reply.finish, reply.done) == ("one two 雪 ", "I count. ", "stop", True)
    assert len(reply.times) == 5
    assert reply.usage["completion_tokens"] == 3


@pytest.mark.parametrize("data", [b"data: {nonsense\n\n", b"data: [3]\n\n", b'data: {"error": {"message": "x"}}\n\n'])
def test_events_that_are_none(data):
    reply = Reply()
    reply.add(data, 0.1)
    assert reply.fault


def test_the_key_goes_to_the_service_only():
    seen = []

    async def note(reader, writer):
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async def run():
        server = await asyncio.start_server(note, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with Relay(f"http://127.0.0.1:{port}", "secret", 20, lambda record: None) as relay:
            async with httpx.AsyncClient() as client:
                await client.get(f"{relay.url}/v1/models?x=1")
        server.close()

    asyncio.run(run())
    assert "GET /v1/models?x=1" in seen[0]
    assert "Authorization: Bearer secret" in seen[0]


def test_prompts_are_named_by_their_texts():
    assert prompt_key(MESSAGES) == prompt_key([{"content": "Hello", "role": "user", "name": "x"}])
    assert prompt_key(MESSAGES) != prompt_key([{"role": "system", "content": "Hello"}])
    assert prompt_key(None) == prompt_key([])
