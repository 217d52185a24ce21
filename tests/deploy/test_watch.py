"""Nodes that watch each other: what is lost is named, what differs is refused, strangers change nothing."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_ascend_dsv41.deploy.server import free_port
from vllm_ascend_dsv41.deploy.watch import Watch, WatchError, watched

WATCHER = Path(__file__).with_name("watcher.py")


class Nodes:
    """Processes that watch each other on 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder, self.running = free_port(), folder, {}

    def start(
        self, rank: int, silence: float = 5.0, beat: float = 0.1, name: str = "", **changed: object
    ) -> subprocess.Popen[bytes]:
        options = {
            "data-parallel-address": "127.0.0.1",
            "data-parallel-rpc-port": str(self.port - 1),
            "data-parallel-size": "3",
            "data-parallel-size-local": "1",
            "max-num-seqs": "4",
            **({"headless": True, "data-parallel-start-rank": str(rank)} if rank else {}),
            **changed,
        }
        log = self.folder / f"{name or rank}.log"
        with log.open("wb") as output:
            command = [sys.executable, str(WATCHER), json.dumps(options), str(beat), str(silence)]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        self.running[name or str(rank)] = process
        return process

    def says(self, name: str, text: str, seconds: float = 20) -> None:
        """Wait until a node's log has a text."""
        deadline = time.monotonic() + seconds
        while text not in self.log(name):
            assert time.monotonic() < deadline, f"{name} does not say {text!r}:\n{self.log(name)}"
            time.sleep(0.05)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")


@pytest.fixture
def nodes(tmp_path):
    made = Nodes(tmp_path)
    yield made
    for process in made.running.values():
        process.kill()
        process.wait()


def together(nodes: Nodes, **more: float) -> None:
    nodes.start(0, **more)
    nodes.says("0", "watching")
    nodes.start(1, **more)
    nodes.says("0", "ranks 1 to 1 (127.0.0.1) has joined")


def test_a_node_that_is_killed_ends_node_0(nodes):
    together(nodes)
    nodes.running["1"].kill()
    assert nodes.running["0"].wait(20) != 0
    assert (
        "dsv41: error: the node with data-parallel ranks 1 to 1 (127.0.0.1) has gone (its connection was closed)"
        in nodes.log("0")
    )


def test_node_0_that_is_killed_ends_the_others(nodes):
    together(nodes)
    nodes.running["0"].kill()
    assert nodes.running["1"].wait(20) != 0
    assert "node 0 (127.0.0.1) has gone" in nodes.log("1")


def test_a_node_that_is_silent_counts_as_gone(nodes):
    together(nodes, silence=1.0)
    nodes.running["1"].send_signal(signal.SIGSTOP)  # as a machine without power: nothing closes the connection
    assert nodes.running["0"].wait(20) != 0
    assert "nothing was heard of it for 1 s" in nodes.log("0")


def test_secrets_stay_here(nodes):
    """The port asks nobody who they are."""
    nodes.start(0, **{"hf-token": "hf_secret", "api-key": "sk_secret", "seed": "31337"})
    nodes.says("0", "watching")
    for hello in (
        '{"ranks": [1, 1], "common": {}}',
        '{"ranks": [1, 1], "common": {"options": {}, "versions": {}, "checkpoint": {}}}',
    ):
        with socket.create_connection(("127.0.0.1", nodes.port)) as stranger, stranger.makefile("rb") as lines:
            stranger.sendall(hello.encode() + b"\n")
            answer = lines.readline().decode()
            assert "secret" not in answer
            assert "31337" not in answer
    assert "secret" not in nodes.log("0")
    assert nodes.running["0"].poll() is None


def test_options_of_the_api_may_differ_and_values_may_be_written_differently(nodes):
    nodes.start(
        0,
        **{
            "api-server-count": "4",
            "additional-config": '{"a":1}',
            "gpu-memory-utilization": "0.9",
            "tool-call-parser": "x",
        },
    )
    nodes.says("0", "watching")
    nodes.start(1, **{"additional-config": '{"a": 1}', "gpu-memory-utilization": "0.90"})
    nodes.says("0", "has joined")


def test_a_port_that_accepts_and_says_nothing_is_waited_for(nodes):
    """Node 0 may still be in its doctor."""
    with socket.create_server(("127.0.0.1", nodes.port)):
        nodes.start(1, silence=0.5)
        time.sleep(2.5)
    nodes.start(0)
    nodes.says("0", "has joined")
    assert nodes.running["1"].poll() is None


def test_nodes_may_come_in_any_order(nodes):
    nodes.start(2)
    nodes.says("2", "waiting for node 0")
    nodes.start(0)
    nodes.says("0", "ranks 2 to 2 (127.0.0.1) has joined")
    time.sleep(0.5)
    assert all(process.poll() is None for process in nodes.running.values())


def test_other_options_are_refused(nodes):
    together(nodes)
    wrong = nodes.start(2, **{"max-num-seqs": "8"})
    assert wrong.wait(20) != 0
    assert "it differs from node 0 in options max-num-seqs; the values are in node 0's log" in nodes.log("2")
    nodes.says("0", "(node 0 / 127.0.0.1): options max-num-seqs: 4 / 8")
    twice = nodes.start(1, name="twice")
    assert twice.wait(20) != 0
    assert "rank 1 is held by 127.0.0.1, too" in nodes.log("twice")
    outside = nodes.start(3, name="outside")
    assert outside.wait(20) != 0
    assert "ranks 3 to 3 are not 1 of 0 to 2" in nodes.log("outside")
    assert nodes.running["0"].poll() is None  # it may be serving with the right ones
    assert nodes.running["1"].poll() is None


def test_another_checkpoint_is_refused(nodes, converted):
    nodes.start(0, model=str(converted("a", "w8a8")))
    nodes.says("0", "watching")
    assert nodes.start(1, model=str(converted("a", "bf16"))).wait(20) != 0
    assert "differs from node 0 in checkpoint" in nodes.log("1")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"{}\n",
        b"[]\n",
        b'{"ranks": [1], "common": {}}\n',
        b'{"ranks": [1, 1], "common": {}}\n',
        b'{"ranks": [Infinity, 3], "common": {}}\n',
        b"[" * 200000 + b"\n",
        b"\xff" * 100 + b"\n",
    ],
)
def test_strangers_are_ignored(nodes, sent):
    together(nodes)
    with socket.create_connection(("127.0.0.1", nodes.port)) as stranger:
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            stranger.recv(100)
    nodes.says("0", "is none; ignored")
    assert all(process.poll() is None for process in nodes.running.values())


def test_a_port_that_is_taken_and_an_address_that_is_not_ours():
    options = {"data-parallel-size": "2", "data-parallel-size-local": "1"}
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(WatchError, match="cannot be listened on"),
            Watch({**options, "data-parallel-address": "127.0.0.1", "data-parallel-rpc-port": str(port - 1)}),
        ):
            pass
    with (
        pytest.raises(WatchError, match="must be an address of this node"),
        Watch({**options, "data-parallel-address": "192.0.2.1"}),
    ):
        pass


def test_the_end_of_a_server_is_no_failure():
    port = free_port()
    options = {
        "data-parallel-address": "127.0.0.1",
        "data-parallel-rpc-port": str(port - 1),
        "data-parallel-size": "2",
        "data-parallel-size-local": "1",
    }
    with Watch(options) as watch:
        pass
    assert watch.failure is None
    with socket.create_server(("127.0.0.1", port)):
        pass  # given back


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("m --data-parallel-size 2 --data-parallel-size-local 1 --data-parallel-address 10.0.0.1", True),
        ("m --data-parallel-size 2 --data-parallel-size-local 1 --data-parallel-address 10.0.0.1 --headless", True),
        ("m --data-parallel-size 2 --data-parallel-size-local 2 --data-parallel-address 10.0.0.1", False),
        ("m --data-parallel-size 2 --data-parallel-address 10.0.0.1", False),
        ("m", False),
        ("m --data-parallel-size two --data-parallel-size-local 1", False),
        (
            "m --data-parallel-size 2 --data-parallel-size-local 1 --data-parallel-address a --data-parallel-hybrid-lb",
            False,
        ),
        (
            "m --data-parallel-size 2 --data-parallel-size-local 1 --data-parallel-address a --data-parallel-backend ray",
            False,
        ),
    ],
)
def test_where_there_is_something_to_watch(words, expected, monkeypatch):
    assert (watched(words.split()) is not None) is expected
    monkeypatch.setenv("DSV41_WATCH_PORT", "0")
    assert watched(words.split()) is None
