"""Nodes of one deployment watch each other.

vLLM's node 0 answers ``/health`` with 200 for as long as nobody asks for text, even when the machine of another node is
gone: nothing is sent between idle nodes. Here each headless node keeps a connection to node 0. A connection that ends,
or is silent for 20 s, ends the server on the other side with one line that says who is missing. On connecting, what
must be the same on all nodes is compared: different options let vLLM hang without a word (vllm#26187).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from . import fingerprint
from .launch import LaunchError, parse_options

logger = logging.getLogger("vllm.dsv41")

BEAT_S, SILENCE_S, GRACE_S = 5.0, 20.0, 30.0
PORT = "DSV41_WATCH_PORT"  # 0: no watch
LONGEST_LINE = 1 << 20
#: What comes of a connection that is not what it should be.
BROKEN = (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError)


class WatchError(OSError):
    """Nodes cannot watch each other: the port is taken, or the other node's server is another one."""


def watch_port(rpc_port: int) -> int:
    """The port beside vLLM's own on node 0. Raises LaunchError."""
    text = os.environ.get(PORT) or str(rpc_port + 1)
    if not text.isdecimal() or int(text) > 65535:
        raise LaunchError(f"{PORT}={text}: expected a port, or 0 for no watch")
    return int(text)


class Watch:
    """Of one server; ``failure`` says who was lost. Use as a context manager around the server."""

    def __init__(self, options: Mapping[str, Any], beat: float = BEAT_S, silence: float = SILENCE_S) -> None:
        self.address = str(options["data-parallel-address"])
        self.port = watch_port(int(options.get("data-parallel-rpc-port", 29550)))
        self.headless = bool(options.get("headless"))
        self.first = int(options.get("data-parallel-start-rank") or 0)
        self.count = int(options.get("data-parallel-size-local", 1))
        self.size = int(options["data-parallel-size"])
        self.beat, self.silence = beat, silence
        self.failure: str | None = None
        self._common = {
            "options": fingerprint.options_of({k: v for k, v in options.items() if k != "model"}),
            "versions": fingerprint.of_the_software(),
            "checkpoint": fingerprint.checkpoint(str(options.get("model", ""))),
        }
        self._ended = threading.Event()
        self._listener: socket.socket | None = None
        self._here: dict[int, str] = {}  # first rank of a node -> its address
        self._lock = threading.Lock()

    def __enter__(self) -> Watch:
        if self.headless:
            threading.Thread(target=self._follow, daemon=True, name="dsv41-watch").start()
        else:
            try:
                self._listener = listen(self.address, self.port)
            except (OSError, OverflowError) as error:
                raise WatchError(
                    f"{self.address}:{self.port} cannot be listened on ({error}): --data-parallel-address must be an "
                    f"address of this node, and the port free; {PORT} chooses another, on all nodes alike"
                ) from error
            threading.Thread(target=self._accept, daemon=True, name="dsv41-watch").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # the thread that accepts would keep the port
            self._listener.close()

    # ---- node 0 -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._ended.is_set():
            try:
                connection, (peer, *_) = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection, peer), daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        """One other node, for as long as it is there."""
        with connection, connection.makefile("rb") as lines:
            connection.settimeout(self.silence)
            try:
                hello = json.loads(lines.readline(LONGEST_LINE))
                first, last = (int(rank) for rank in hello["ranks"])
                common = {part: dict(hello["common"][part]) for part in self._common}
            except BROKEN:
                logger.warning("%s connected to the watch of the nodes and is none; ignored", peer)
                return
            who = f"node with data-parallel ranks {first} to {last} ({peer})"
            refusal = self._refusal(first, last, peer, common)
            with contextlib.suppress(OSError):
                _send(connection, {"refused": refusal})
                if not refusal:
                    logger.info("%s has joined", who)
            if refusal:  # that node ends; this server may be serving with the right ones
                logger.error("the %s cannot take part: %s", who, refusal)
                return
            why = self._beat(connection, lines)
            if not self._ended.is_set():
                self._fail(
                    f"the {who} has gone ({why}). Its ranks held a part of every layer, so nothing can be served: look "
                    "at its log, then start all nodes again"
                )

    def _refusal(self, first: int, last: int, peer: str, common: Mapping[str, Any]) -> str | None:
        """Why a node cannot take part. It is told what differs and not how: this port asks nobody who they are."""
        different = fingerprint.differences(self._common, common)
        if different:
            logger.error("node 0 and %s differ (node 0 / %s): %s", peer, peer, "; ".join(different))
            names = ", ".join(text.partition(":")[0] for text in different)
            return f"it differs from node 0 in {names}; the values are in node 0's log"
        with self._lock:
            if last - first + 1 != self.count or first % self.count or not 0 <= first <= last < self.size:
                return f"ranks {first} to {last} are not {self.count} of 0 to {self.size - 1}"
            for held, who in {**self._here, self.first: "node 0"}.items():
                if first == held:
                    return f"data-parallel rank {first} is held by {who}, too; give every node its own NODE_RANK"
            self._here[first] = peer
        return None

    # ---- other nodes ------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Find node 0, for as long as it takes, and stay connected."""
        said = 0.0
        while not self._ended.is_set():
            try:
                connection = socket.create_connection((self.address, self.port), timeout=self.beat)
                with connection, connection.makefile("rb") as lines:
                    connection.settimeout(self.silence)
                    _send(connection, {"ranks": [self.first, self.first + self.count - 1], "common": self._common})
                    refused = json.loads(lines.readline(LONGEST_LINE))["refused"]
                    if refused:
                        self._fail(f"node 0 ({self.address}) refuses this node: {refused}")
                        return
                    why = self._beat(connection, lines)
                if not self._ended.is_set():
                    self._fail(f"node 0 ({self.address}) has gone ({why}); this node cannot serve without it")
                return
            except BROKEN as error:  # not there yet, or its doctor is still looking
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    logger.info("waiting for node 0 at %s:%d (%s)", self.address, self.port, error)
                self._ended.wait(1)

    # ---- both -------------------------------------------------------------------------------------

    def _beat(self, connection: socket.socket, lines: Any) -> str:
        """Send and expect a line every few seconds. Returns why that ended."""
        stop = threading.Event()

        def send() -> None:
            while not stop.wait(self.beat) and not self._ended.is_set():
                with contextlib.suppress(OSError):
                    connection.sendall(b"\n")

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        try:
            while True:
                if not lines.readline(LONGEST_LINE):
                    return "its connection was closed"
        except TimeoutError:
            return f"nothing was heard of it for {self.silence:.0f} s"
        except OSError as error:
            return str(error)
        finally:
            stop.set()

    def _fail(self, text: str) -> None:
        """Say it, and end this server: as SIGTERM does, and after a while whatever is left of it."""
        with self._lock:
            if self.failure is not None or self._ended.is_set():
                return
            self.failure = text
        print(f"dsv41: error: {text}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
        os._exit(1)


def listen(address: str, port: int) -> socket.socket:
    """A listening socket of IPv4 or IPv6. Raises OSError, OverflowError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=64)


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def watched(arguments: Sequence[str]) -> dict[str, Any] | None:
    """The options of a server whose nodes should watch each other; None where there is one node, another way of
    balancing than vLLM's own, or no wish for it."""
    options = parse_options(arguments)
    try:
        size = int(options.get("data-parallel-size", 1))
        local = int(options.get("data-parallel-size-local", size))
        int(options.get("data-parallel-rpc-port", 29550))
    except ValueError:
        return None  # vLLM says so
    other = ("data-parallel-hybrid-lb", "data-parallel-external-lb", "data-parallel-rank")
    if size <= local or not options.get("data-parallel-address") or any(options.get(name) for name in other):
        return None
    if options.get("data-parallel-backend", "mp") != "mp" or os.environ.get(PORT) == "0":
        return None
    return options
