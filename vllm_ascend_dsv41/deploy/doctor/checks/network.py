"""The network between the servers: interface, routes, ports."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ...watch import watch_port
from ..host import Host
from ..report import Result, bad, good, skip, warn
from ..target import Target

HCCL_PORTS = 32  # from CANN 8.5 on; 16 before
LISTEN = "0A"


def _json(host: Host, *command: str) -> tuple[Any, str]:
    """What ``ip -j`` says, and its complaint."""
    output = host.run(*command)
    if output is None:
        return None, "the tool ip is not installed (iproute2)"
    try:
        return json.loads(output.text or "null"), ""
    except json.JSONDecodeError:
        return None, " ".join(output.text.split())


def _addresses(host: Host, nic: str) -> tuple[list[str], str]:
    links, complaint = _json(host, "ip", "-j", "-4", "addr", "show", "dev", nic)
    found = [entry["local"] for link in links or [] for entry in link.get("addr_info", []) if "local" in entry]
    return found, complaint


def interface(host: Host, target: Target) -> Result:
    """LOCAL_IP must be an address of NIC_NAME."""
    name, node = "interface", target.node
    if target.nodes == 1 or not node.nic:
        return skip(name, "one server, or no NIC_NAME given")
    if "/" in node.nic or not host.names(f"/sys/class/net/{node.nic}"):
        there = [entry for entry in host.names("/sys/class/net") if entry != "lo"]
        return bad(
            name,
            f"no interface {node.nic}",
            f"one of {', '.join(there) or '(none but lo)'}",
            "set NIC_NAME to the interface that has LOCAL_IP (ip -br addr)",
        )
    state = (host.text(f"/sys/class/net/{node.nic}/operstate") or "unknown").strip()
    if state not in ("up", "unknown"):
        return bad(name, f"{node.nic} is {state}", "up", f"ip link set {node.nic} up, or choose another interface")
    found, complaint = _addresses(host, node.nic)
    if complaint:
        return skip(name, complaint)
    if node.local_ip not in found:
        return bad(
            name,
            f"{node.nic} has {', '.join(found) or 'no IPv4 address'}",
            f"LOCAL_IP {node.local_ip}",
            "set LOCAL_IP to this server's address on that interface, or NIC_NAME to the interface that has it",
        )
    return good(name, f"{node.nic} has {node.local_ip}")


def route(host: Host, target: Target) -> Result:
    """The way to node 0 must leave by NIC_NAME, from LOCAL_IP."""
    name, node = "route", target.node
    if target.nodes == 1 or not node.nic or node.local_ip == node.node0_ip:
        return skip(name, "node 0, or one server")
    ways, complaint = _json(host, "ip", "-j", "route", "get", node.node0_ip)
    if ways is None and "not installed" in complaint:
        return skip(name, complaint)
    if not ways:
        return bad(
            name,
            f"no way to {node.node0_ip}: {complaint or 'unreachable'}",
            "a route",
            "check NODE0_IP and the routes (ip route)",
        )
    device, source = ways[0].get("dev", "?"), ways[0].get("prefsrc", node.local_ip)
    if device != node.nic or source != node.local_ip:
        return bad(
            name,
            f"to {node.node0_ip} by {device} from {source}",
            f"by {node.nic} from {node.local_ip}",
            "NODE0_IP must be node 0's address on the network of NIC_NAME; HCCL and gloo connect from there",
        )
    return good(name, f"to {node.node0_ip} by {device}")


def interface_names(host: Host, target: Target) -> Result:
    """HCCL_SOCKET_IFNAME is a prefix: eth1 is eth10, too."""
    name = "interface-names"
    asked = target.environment.get("HCCL_SOCKET_IFNAME", "")
    if not asked or asked.startswith(("=", "^")):
        return good(name, asked or "HCCL_SOCKET_IFNAME not set")
    there = host.names("/sys/class/net")
    fits = [entry for entry in there if any(entry.startswith(prefix) for prefix in asked.split(","))]
    if not there:
        return skip(name, "no /sys/class/net")
    if not fits:
        return bad(
            name,
            f"HCCL_SOCKET_IFNAME={asked} is no interface's beginning",
            f"one of {', '.join(there)}",
            "set NIC_NAME to an interface of this server",
        )
    if len(fits) > 1:
        return warn(
            name,
            f"HCCL_SOCKET_IFNAME={asked} fits {', '.join(fits)}",
            "one interface",
            f"export HCCL_SOCKET_IFNAME=={asked} (an equals sign in front: exactly this one)",
        )
    return good(name, f"HCCL_SOCKET_IFNAME fits {fits[0]} only")


def ports(host: Host, target: Target) -> Result:
    """On node 0 the API's port, the port of the handshake and the watch's must be free."""
    name = "ports"
    if target.options.get("headless"):
        return good(name, "none of its own; node 0's are tried with --peers")
    wanted = [(str(target.options.get("host", "0.0.0.0")), target.number("port", 8000), "--port")]
    if target.nodes > 1:
        address, rpc = (
            str(target.options.get("data-parallel-address", "")),
            target.number("data-parallel-rpc-port", 29550),
        )
        wanted.append((address, rpc, "--data-parallel-rpc-port"))
        wanted.append((address, watch_port(rpc), "the watch of the nodes, rpc port + 1"))
    taken = []
    for address, port, option in wanted:
        reason = host.taken(address, port)
        if reason is not None:
            taken.append(f"{address}:{port} ({option}): {reason}")
    if taken:
        return bad(
            name,
            "; ".join(taken),
            "ports that can be listened on",
            "end what listens there (ss -ltnp), choose another port, or correct the address",
        )
    return good(name, ", ".join(f"{address}:{port}" for address, port, _ in wanted))


def hccl_ports(host: Host, target: Target) -> Result:
    """HCCL listens from 60000 on; another job's ports end this one's start."""
    name = "hccl-ports"
    if not target.on_npu:
        return skip(name, "no NPU")
    if target.environment.get("HCCL_HOST_SOCKET_PORT_RANGE"):
        return good(name, f"HCCL_HOST_SOCKET_PORT_RANGE={target.environment['HCCL_HOST_SOCKET_PORT_RANGE']}")
    base = target.environment.get("HCCL_IF_BASE_PORT", "60000")
    if not base.isdecimal() or not 1024 <= int(base) <= 65520:
        return bad(name, f"HCCL_IF_BASE_PORT={base}", "1024 to 65520", "export HCCL_IF_BASE_PORT=60000")
    mine = set(range(int(base), int(base) + HCCL_PORTS)) | {16666}
    busy = sorted(mine & listening(host))
    if busy:
        return bad(
            name,
            f"listened on: {', '.join(map(str, busy))}",
            f"{base} to {int(base) + HCCL_PORTS - 1} and 16666 free",
            "end the other HCCL job (ss -ltnp), or export HCCL_IF_BASE_PORT=50000 on all nodes",
        )
    return good(name, f"{base} to {int(base) + HCCL_PORTS - 1} and 16666 free")


def listening(host: Host) -> set[int]:
    """Ports that somebody listens on, of /proc/net/tcp and tcp6."""
    found = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (host.text(path) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == LISTEN:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


CHECKS: dict[str, Callable[[Host, Target], Result]] = {
    "interface": interface,
    "route": route,
    "interface-names": interface_names,
    "ports": ports,
    "hccl-ports": hccl_ports,
}
