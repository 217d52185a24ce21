"""``dsv41 doctor --peers``: nodes meet before the load, try their ports both ways, and compare themselves.

Node 0 listens for the others on the port of vLLM's handshake. Each sends its fingerprint and a port that it listens on
itself, which node 0 then connects to; in the end every node has the same list of results.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..watch import BROKEN, listen, watch_port
from .compare import compare, device_addresses, facts
from .host import Host
from .report import Result, Status, bad, good, skip
from .target import Target

ANSWER_S = 10.0
LONGEST = 1 << 22


def meet(host: Host, target: Target, failures: Sequence[str], wait: float, say: Callable[[str], None]) -> list[Result]:
    """Lines about the other nodes. ``failures``: checks that failed here, for the others to know; ``wait``: seconds
    until all must have come."""
    if target.nodes == 1:
        return [skip("peers", "one server")]
    devices = device_addresses(host, target)
    own: dict[str, Any] = {
        "rank": target.node.rank,
        "local_ip": target.node.local_ip,
        "failures": list(failures),
        "facts": facts(host, target),
        "devices": devices,
    }
    if target.node.rank == 0:
        results, everyone = _host(target, own, wait, say)
    else:
        results, everyone = _visit(target, own, wait, say)
    return results + _pings(host, target, devices, everyone)


def _host(
    target: Target, own: Mapping[str, Any], wait: float, say: Callable[[str], None]
) -> tuple[list[Result], list[Any]]:
    """Node 0: wait for all, answer all."""
    address, port = str(target.options.get("data-parallel-address")), target.number("data-parallel-rpc-port", 29550)
    met: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    problems: list[str] = []
    deadline = time.monotonic() + wait
    try:
        with contextlib.ExitStack() as open_ones:
            try:
                listener = open_ones.enter_context(listen(address, port))
                open_ones.enter_context(listen(address, watch_port(port)))
            except (OSError, OverflowError) as error:
                return [_unreachable(f"{address}:{port}: {error}", "ports of node 0 that can be listened on")], []
            say(f"waiting up to {wait:.0f} s for {target.nodes - 1} other nodes to run the same")
            while len(met) < target.nodes - 1:
                listener.settimeout(max(min(deadline - time.monotonic(), 10.0), 0.01))
                try:
                    connection, (peer, *_) = listener.accept()
                except TimeoutError:
                    if time.monotonic() > deadline:
                        break
                    missing = [rank for rank in range(1, target.nodes) if rank not in met]
                    say(f"waiting for node {', '.join(map(str, missing))}")
                    continue
                open_ones.enter_context(connection)
                try:
                    connection.settimeout(ANSWER_S)
                    theirs = _checked(_read(connection))
                    rank = int(theirs["rank"])
                    if rank in met or not 0 < rank < target.nodes:
                        other = met[rank][1]["address"] if rank in met else address
                        text = f"two nodes say that they are node {rank}: {other} and {peer}"
                        problems.append(text)
                        _write(connection, {"results": [_as_json(_twice(text))], "everyone": []})
                        continue
                    peer = theirs["address"] = str(theirs["local_ip"])  # where HCCL and gloo will look for it
                    theirs["back"] = _reaches(peer, int(theirs["port"]))
                    met[rank] = connection, theirs
                except BROKEN as error:
                    say(f"{peer} connected and did not speak: {error}")
            results = _results(target, own, met, problems)
            everyone = [
                list(own["devices"].values()),
                *(list(theirs["devices"].values()) for _, theirs in (met[rank] for rank in sorted(met))),
            ]
            for connection, _ in met.values():
                with contextlib.suppress(OSError):
                    _write(connection, {"results": [_as_json(result) for result in results], "everyone": everyone})
            return results, everyone
    finally:
        for connection, _ in met.values():
            connection.close()


def _results(
    target: Target, own: Mapping[str, Any], met: Mapping[int, tuple[socket.socket, Any]], problems: Sequence[str]
) -> list[Result]:
    results = [_twice(text) for text in problems]
    missing = [rank for rank in range(1, target.nodes) if rank not in met]
    back = [
        f"node {rank} ({theirs['address']}): {theirs['back']}"
        for rank, (_, theirs) in sorted(met.items())
        if theirs["back"]
    ]
    if missing:
        results.append(
            _unreachable(
                f"node {', '.join(map(str, missing))} did not come", f"{target.nodes - 1} other nodes at NODE0_IP"
            )
        )
    elif back:
        results.append(
            _unreachable(f"not reached from node 0: {'; '.join(back)}", "connections in both directions, on any port")
        )
    else:
        results.append(good("peers", f"{target.nodes} nodes reach each other"))
    ill = {0: own["failures"], **{rank: theirs["failures"] for rank, (_, theirs) in met.items()}}
    texts = [f"node {rank}: {', '.join(failures)}" for rank, failures in sorted(ill.items()) if failures]
    if texts:
        results.append(
            bad(
                "peers",
                f"checks that failed: {'; '.join(texts)}",
                "none on any node",
                "that node's own lines say what to do",
            )
        )
    if met:
        results += compare(
            {"node 0": own["facts"], **{f"node {rank}": theirs["facts"] for rank, (_, theirs) in sorted(met.items())}}
        )
    return results


def _visit(
    target: Target, own: Mapping[str, Any], wait: float, say: Callable[[str], None]
) -> tuple[list[Result], list[Any]]:
    """Another node: go to node 0 and ask for the results."""
    address, port = str(target.options.get("data-parallel-address")), target.number("data-parallel-rpc-port", 29550)
    deadline, last = time.monotonic() + wait, 0.0
    with _listening(target.node.local_ip) as own_port:
        if isinstance(own_port, str):
            return [_unreachable(own_port, "LOCAL_IP to be an address of this server")], []
        while True:
            try:
                connection = socket.create_connection((address, port), 5, (target.node.local_ip, 0))
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    return [
                        _unreachable(
                            f"node 0 at {address}:{port}: {error}",
                            "its doctor or script running there, and no firewall between",
                        )
                    ], []
                if time.monotonic() - last > 10:
                    last = time.monotonic()
                    say(f"waiting for node 0 at {address}:{port} ({error})")
                time.sleep(0.5)
        with connection:
            try:
                _write(connection, {**own, "port": own_port})
                connection.settimeout(max(deadline - time.monotonic(), 0) + ANSWER_S)
                answer = _read(connection)
                return [_from_json(item) for item in answer["results"]], answer["everyone"]
            except BROKEN as error:
                text = f"node 0 at {address}:{port} did not answer: {error}"
                return [
                    _unreachable(text, "the doctor of the same version on node 0; is a server running there already?")
                ], []


@contextlib.contextmanager
def _listening(address: str) -> Iterator[int | str]:
    """A port of this node that answers connections, or why there is none."""
    try:
        server = listen(address, 0)
    except OSError as error:
        yield f"{address}: {error}"
        return
    with server:
        yield int(server.getsockname()[1])


def _reaches(address: str, port: int) -> str:
    """Why a port of another node is not reached; empty where it is."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        return str(error)
    return ""


def _pings(host: Host, target: Target, mine: Mapping[int, str], everyone: Sequence[Sequence[str]]) -> list[Result]:
    """Between NPUs: the n-th device of this node to the n-th of every other."""
    name = "npu-ping"
    if not target.on_npu:
        return []
    a3 = target.recipe is not None and "A3" in target.recipe.hardware
    option = "-hccs_ping" if a3 else "-ping"
    wanted = [
        (device, address)
        for rank, theirs in enumerate(everyone)
        if rank != target.node.rank
        for device, address in zip(mine, theirs, strict=False)
    ]
    if not wanted:
        return [skip(name, "no addresses of other nodes' NPUs")]
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda pair: host.run("hccn_tool", "-i", str(pair[0]), option, "-g", "address", pair[1]), wanted)
        )
    lost = []
    for (device, address), answer in zip(wanted, answers, strict=True):
        match = re.search(r"([\d.]+)% packets? loss", answer.text) if answer else None
        if match is None or float(match[1]) > 0:
            lost.append(f"device {device} to {address}: {match[1] + ' % lost' if match else 'no answer'}")
    if lost:
        return [
            bad(
                name,
                "; ".join(lost[:4]) + (" ..." if len(lost) > 4 else ""),
                "no loss",
                "same VLAN and MTU on the switch ports of all NPUs; A3: servers of one superpod (hccn_tool -i N "
                "-ping -g address IP)",
            )
        ]
    return [good(name, f"{len(wanted)} ways, no loss")]


def _unreachable(found: str, expected: str) -> Result:
    return bad(
        "peers",
        found,
        expected,
        "start all nodes, check NODE0_IP and LOCAL_IP, and let the servers reach each other on all ports",
    )


def _twice(text: str) -> Result:
    return bad("peers", text, "every node with its own rank", "give every node its own NODE_RANK")


def _as_json(result: Result) -> dict[str, Any]:
    return result.as_json()


def _from_json(item: Mapping[str, Any]) -> Result:
    return Result(
        str(item["check"]), Status(item["status"]), str(item["found"]), str(item["expected"]), str(item["remedy"])
    )


def _write(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket) -> dict[str, Any]:
    """One line of JSON, within the connection's time-out altogether. Raises OSError, ValueError, TypeError."""
    deadline = time.monotonic() + (connection.gettimeout() or ANSWER_S)
    parts = b""
    while not parts.endswith(b"\n"):
        connection.settimeout(max(deadline - time.monotonic(), 0.01))
        part = connection.recv(1 << 16)
        parts += part
        if not part or len(parts) > LONGEST:
            raise ValueError("the connection was closed" if not part else "too long")
    found = json.loads(parts)
    if not isinstance(found, dict):
        raise TypeError("no object")
    return found


def _checked(theirs: dict[str, Any]) -> dict[str, Any]:
    """What another node says of itself, or TypeError."""
    kinds = {"rank": int, "port": int, "local_ip": str, "failures": list, "facts": dict, "devices": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(theirs.get(name), kind)]
    if wrong or not all(isinstance(part, dict) for part in theirs["facts"].values()):
        raise TypeError(f"no doctor's message: {', '.join(wrong) or 'facts'}")
    return theirs
