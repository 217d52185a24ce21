"""Nodes that meet before a start: real sockets on 127.0.0.x, recorded machines."""

from __future__ import annotations

import dataclasses
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from deploy.nodes import hccn, healthy, launched
from vllm_ascend_dsv41.deploy.doctor.peers import meet
from vllm_ascend_dsv41.deploy.doctor.report import Status
from vllm_ascend_dsv41.deploy.launch import Node
from vllm_ascend_dsv41.deploy.server import free_port


def target(recipe, rank, port, local=None, **options):
    made = launched(recipe, rank)
    changed = {**made.options, "data-parallel-address": "127.0.0.1", "data-parallel-rpc-port": str(port), **options}
    return dataclasses.replace(
        made, options=changed, node=Node(rank, "127.0.0.1", local or f"127.0.0.{rank + 1}", "enp67s0f5")
    )


def together(recipe, *targets, nodes=None, wait=5.0, failures=None):
    """Results of every node, by check."""
    hosts = nodes or [healthy(recipe, one.node.rank) for one in targets]
    ill = failures or [[] for _ in targets]
    with ThreadPoolExecutor(len(targets)) as pool:
        jobs = [
            pool.submit(meet, host, one, bad, wait, lambda text: None)
            for host, one, bad in zip(hosts, targets, ill, strict=True)
        ]
        return [{r.check: r for r in job.result()} for job in jobs]


@pytest.mark.parametrize(("recipe", "count"), [("a3x2", 2), ("a2x4", 4), ("cpu-demo-x2", 2)])
def test_healthy_nodes(recipe, count):
    port = free_port()
    for found in together(recipe, *(target(recipe, rank, port) for rank in range(count))):
        assert {r.status for r in found.values()} == {Status.PASS}
        assert found["peers"].found == f"{count} nodes reach each other"
    assert ("npu-ping" in found) is (recipe != "cpu-demo-x2")


def test_a_node_that_does_not_come():
    port = free_port()
    (found,) = together("a3x2", target("a3x2", 0, port), wait=0.5)
    assert found["peers"].status is Status.FAIL
    assert "node 1 did not come" in found["peers"].found
    (found,) = together("a3x2", target("a3x2", 1, port), wait=0.5)
    assert "node 0 at 127.0.0.1" in found["peers"].found
    assert "no firewall" in found["peers"].expected


def test_what_differs_is_told_to_all():
    port = free_port()
    for found in together("a3x2", target("a3x2", 0, port), target("a3x2", 1, port, **{"max-num-seqs": "8"})):
        assert found["same-options"].status is Status.FAIL
        assert "max-num-seqs: 32 / 8" in found["same-options"].found


def test_what_failed_on_one_is_told_to_all():
    port = free_port()
    for found in together("a3x2", target("a3x2", 0, port), target("a3x2", 1, port), failures=[[], ["shm"]]):
        assert "node 1: shm" in found["peers"].found
        assert found["peers"].status is Status.FAIL


def test_two_nodes_with_one_rank():
    port = free_port()
    twins = target("a2x4", 1, port), target("a2x4", 1, port, local="127.0.0.9")
    found = together("a2x4", target("a2x4", 0, port), *twins, wait=2.0)
    assert any("two nodes say that they are node 1" in one["peers"].found for one in found)
    assert all(one["peers"].status is Status.FAIL for one in found)


def test_npus_that_do_not_reach_each_other():
    port = free_port()
    lost = "device 4 PING\nrecv time out seq=0\n3 packets transmitted, 0 received, 100.00% packet loss\n"
    one = healthy("a2x4", 0)
    one.tools["hccn_tool"] = hccn(False, 1, {(4, "ping"): lost})
    nodes = [one, *(healthy("a2x4", rank) for rank in (1, 2, 3))]
    found = together("a2x4", *(target("a2x4", rank, port) for rank in range(4)), nodes=nodes)
    assert found[0]["npu-ping"].status is Status.FAIL
    assert "device 4 to 11.12.2.84: 100.00 % lost" in found[0]["npu-ping"].found
    assert "VLAN" in found[0]["npu-ping"].remedy
    assert found[1]["npu-ping"].status is Status.PASS


def test_other_superpods_and_tls_switches():
    port = free_port()
    other = healthy("a3x2", 1)
    other.tools["hccn_tool"] = hccn(True, 2, {(n, "tls"): f"dev_id:{n}, tls switch[1](0:disable)\n" for n in range(16)})
    for found in together("a3x2", target("a3x2", 0, port), target("a3x2", 1, port), nodes=[healthy("a3x2", 0), other]):
        assert "TLS switch: ['0'] / ['1']" in found["same-ascend"].found


def test_ports_that_are_taken_and_strangers():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (found,) = together("a3x2", target("a3x2", 0, taken.getsockname()[1]), wait=0.5)
    assert found["peers"].status is Status.FAIL
    assert "Address already in use" in found["peers"].found
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(together, "a3x2", target("a3x2", 0, port))
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n\n")
                break
            except OSError:
                continue
        second = pool.submit(together, "a3x2", target("a3x2", 1, port))
        assert first.result()[0]["peers"].status is Status.PASS
        assert second.result()[0]["peers"].status is Status.PASS


@pytest.mark.parametrize(
    "message",
    [
        b'{"rank":1,"local_ip":"127.0.0.1","port":1}\n',
        b"[" * 100000 + b"\n",
        b'{"rank":1,"local_ip":"127.0.0.1","port":70000,"failures":[],"facts":[],"devices":{}}\n',
    ],
)
def test_a_node_that_speaks_nonsense(message):
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(together, "a3x2", target("a3x2", 0, port), wait=1.0)
        for _ in range(200):
            try:
                with socket.create_connection(("127.0.0.1", port)) as stranger:
                    stranger.sendall(message)
                break
            except OSError:
                time.sleep(0.01)
        assert "node 1 did not come" in first.result()[0]["peers"].found


def test_an_address_that_is_not_this_nodes():
    port = free_port()
    found = together("a3x2", target("a3x2", 0, port), target("a3x2", 1, port, local="192.0.2.7"), wait=1.0)
    assert "192.0.2.7" in found[1]["peers"].found
    assert "LOCAL_IP" in found[1]["peers"].expected
