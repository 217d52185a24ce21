"""Servers of Ascend NPUs as the doctor sees them, put together from outputs that were published.

Formats: npu-smi 25.3 and 26.0 of vllm-ascend issues (#12980 among them), hccn_tool of public guides and of the driver's
source, files of CANN and driver packages. No NPU was asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_ascend_dsv41.deploy.doctor.host import Output
from vllm_ascend_dsv41.deploy.doctor.target import Target, target_of
from vllm_ascend_dsv41.deploy.launch import Node
from vllm_ascend_dsv41.deploy.recipe import load

GIB = 1 << 30


@dataclass
class Recorded:
    """A node from memory: files, tools' answers, file systems, ports that are taken."""

    files: dict[str, str] = field(default_factory=dict)
    empty: set[str] = field(default_factory=set)  # device files and folders' entries without content
    tools: dict[str, Callable[..., Output | None]] = field(default_factory=dict)
    rooms: dict[str, tuple[int, int]] = field(default_factory=dict)
    ports: dict[tuple[str, int], str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def text(self, path: str) -> str | None:
        return self.files.get(path)

    def names(self, folder: str) -> list[str]:
        start = folder.rstrip("/") + "/"
        paths = [*self.files, *self.empty]
        return sorted({path[len(start) :].split("/")[0] for path in paths if path.startswith(start)})

    def size(self, path: str) -> int | None:
        return len(self.files[path]) if path in self.files else None

    def room(self, path: str) -> tuple[int, int] | None:
        return self.rooms.get(path)

    def run(self, *command: str) -> Output | None:
        tool = self.tools.get(command[0])
        return None if tool is None else tool(*command[1:])

    def taken(self, address: str, port: int) -> str | None:
        return self.ports.get((address, port))


BAR = "+------------------------------------------------------------------------------------------------+"
DOUBLE = "+===========================+===============+====================================================+"


def npu_smi(a3: bool, used: Mapping[int, int] | None = None, health: Mapping[int, str] | None = None) -> str:
    """``npu-smi info``; ``used``: MB by device, ``health``: by device."""
    used, health, lines = used or {}, health or {}, [BAR]
    lines.append("| npu-smi 25.5.1                   Version: 25.5.1                                               |")
    lines += [DOUBLE.replace("=", "-")]
    lines.append("| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|")
    lines.append(
        f"| Chip  {'Phy-ID' if a3 else '      '}              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |"
    )
    lines.append(DOUBLE)
    for device in range(16 if a3 else 8):
        card, chip = (device // 2, device % 2) if a3 else (device, 0)
        name = "Ascend910" if a3 else "910B3"
        power = "-" if chip else "166.9"
        lines.append(
            f"| {card:<6}{name:<20}| {health.get(device, 'OK'):<14}| {power:<12}{38:<18}0    / 0             |"
        )
        identity = f"{chip:<6}{device:<20}" if a3 else f"{chip:<26}"
        lines.append(
            f"| {identity}| 0000:{0x9D - 2 * device:02X}:00.0  | 0           0    / 0          {used.get(device, 2885):<5}/ 65536         |"
        )
        lines.append(DOUBLE if chip or not a3 else BAR)
    lines.append(DOUBLE.replace("=", "-"))
    lines.append("| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |")
    lines.append(DOUBLE)
    for card in range(8):
        mine = [d for d in used if (d // 2 if a3 else d) == card]
        for device in mine:
            lines.append(
                f"| {card:<8}{device % 2 if a3 else 0:<18}| {4000 + device:<14}| {'VLLMWorker_TP':<25}| {used[device]:<24}|"
            )
        if not mine:
            lines.append(
                f"| No running processes found in NPU {card}                                                            |"
            )
        lines.append(DOUBLE)
    return "\n".join(lines) + "\n"


def hccn(a3: bool, subnet: int, answers: Mapping[tuple[int, str], str] | None = None) -> Callable[..., Output]:
    """``hccn_tool -i N -WHAT -g ...``; ``answers``: by (device, what)."""

    def tool(*words: str) -> Output:
        device, what = int(words[1]), words[2].lstrip("-")
        said = (answers or {}).get((device, what))
        if said is None:
            said = {
                "link": "link status: UP\n",
                "net_health": "net health status: Success\n",
                "ip": f"ipaddr:11.12.{subnet}.{80 + device}\nnetmask:255.255.255.0\n",
                "vnic": f"vnic link status: UP\nvnic ipaddr: 192.168.{subnet}.{199 + device}\nvnic netmask: 255.255.255.0\n",
                "tls": f"dev_id:{device}, tls switch[0](0:disable, 1:enable), tls preconfigured[0](0:non-preset, 1:preset), tls alarm time threshold[60]days\n",
                "ping": f"device {device} PING\nrecv seq=0,time=0.114000ms\n3 packets transmitted, 3 received, 0.00% packet loss\n",
                "hccs_ping": f"device {device} PING\n\nThis pkt ping success!\n2 packets transmitted, 2 received, 0.00% packets loss\n",
            }[what]
        return Output(said, 0)

    return tool


def ip_tool(nic: str, address: str, via: str | None = None, source: str | None = None) -> Callable[..., Output]:
    """``ip -j -4 addr show dev NIC`` and ``ip -j route get ADDRESS``."""

    def tool(*words: str) -> Output:
        if "route" in words:
            return Output(
                json.dumps(
                    [
                        {
                            "dst": words[-1],
                            "dev": via or nic,
                            "prefsrc": source or address,
                            "flags": [],
                            "uid": 0,
                            "cache": [],
                        }
                    ]
                ),
                0,
            )
        if words[-1] != nic:
            return Output(f'Device "{words[-1]}" does not exist.\n', 1)
        return Output(
            json.dumps(
                [
                    {
                        "ifname": nic,
                        "operstate": "UP",
                        "addr_info": [{"family": "inet", "local": address, "prefixlen": 24}],
                    }
                ]
            ),
            0,
        )

    return tool


def healthy(recipe: str = "a3x2", rank: int = 0) -> Recorded:
    """A server on which nothing is wrong."""
    a3 = "a3" in recipe
    address = f"10.0.0.{rank + 1}"
    node = Recorded()
    node.files = {
        "/proc/meminfo": f"MemTotal:       {1500 * 1024 * 1024} kB\nMemAvailable:   {1400 * 1024 * 1024} kB\n",
        "/proc/self/cgroup": "0::/docker/1234\n",
        "/sys/fs/cgroup/docker/1234/memory.max": "max\n",
        "/sys/fs/cgroup/docker/1234/memory.current": "1000000\n",
        "/sys/fs/cgroup/docker/1234/memory.stat": "anon 1000000\nactive_file 0\ninactive_file 0\n",
        "/proc/self/status": "Name:\tpython\nCapEff:\t000001ffffffffff\n",
        "/proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max open files            65535                65535                files\n"
        "Max locked memory         unlimited            unlimited            bytes\n",
        "/proc/sys/kernel/osrelease": "6.6.0-72.0.0.76.oe2403sp1.aarch64\n",
        "/proc/sys/kernel/numa_balancing": "0\n",
        "/proc/sys/vm/swappiness": "0\n",
        "/proc/net/tcp": "  sl  local_address rem_address   st tx_queue rx_queue\n   0: 00000000:0016 00000000:0000 0A 00000000:00000000\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "[always] madvise never\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
        "/sys/class/net/lo/operstate": "unknown\n",
        "/sys/class/net/enp67s0f5/operstate": "up\n",
        "/sys/class/net/enp189s0f0/operstate": "up\n",
        "/usr/local/Ascend/driver/version.info": "Version=26.0.rc1\nascendhal_version=7.35.23\n"
        "compatible_version_fw=[7.0.0,8.9.9]\npackage_version=26.0.rc1\n",
        "/usr/local/Ascend/firmware/version.info": "Version=8.5.0.2.220\nfirmware_version=1.0\npackage_version=26.0.rc1\n",
        "/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=9.2.0\n"
        "arch=aarch64\nos=linux\npath=/usr/local/Ascend/cann-9.2.0/aarch64-linux\n",
        **{f"/proc/svm/dev{n}/feature/host_mem_pool": "1\n" if a3 else "0\n" for n in range(16 if a3 else 8)},
    }
    node.empty = {f"/dev/{name}" for name in ("davinci_manager", "devmm_svm", "hisi_hdc", "shm", "null")}
    node.empty |= {f"/dev/davinci{n}" for n in range(16 if a3 else 8)}
    node.rooms = {"/dev/shm": (512 * GIB, 511 * GIB)}
    node.tools = {
        "ip": ip_tool("enp67s0f5", address),
        "hccn_tool": hccn(a3, rank + 1),
        "npu-smi": lambda *words: Output(
            "\tSDID                           : 16777216\n\tSuper Pod Size                 : 384\n"
            "\tSuper Pod ID                   : 3\n\tServer Index                   : 4\n"
            if "spod-info" in words
            else npu_smi(a3),
            0,
        ),
    }
    return node


def launched(recipe: str = "a3x2", rank: int = 0, given: list[str] | None = None, **environment: str) -> Target:
    """What the recipe starts on that server, without a checkpoint."""
    loaded = load(recipe)
    node = Node(rank, "10.0.0.1", f"10.0.0.{rank + 1}", "enp67s0f5") if loaded.topology.number("nodes") > 1 else Node()
    target = target_of(loaded, node, "/data/weights", None, {})
    if given is not None:
        target = target_of(loaded, node, "/data/weights", given, {**target.environment})
    merged = {**target.environment, **environment}
    return Target(
        target.recipe,
        target.node,
        target.options,
        {k: v for k, v in merged.items() if v != ""},
        target.model,
        target.given,
        target.drift,
    )
