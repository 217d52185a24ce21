"""Every failure that the doctor knows makes exactly its check fail, on a server on which all else is well."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from deploy.nodes import GIB, Recorded, hccn, healthy, ip_tool, launched, npu_smi
from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.deploy.doctor import checks, examine
from vllm_ascend_dsv41.deploy.doctor.checks import software
from vllm_ascend_dsv41.deploy.doctor.checks.devices import dies
from vllm_ascend_dsv41.deploy.doctor.compare import compare, facts
from vllm_ascend_dsv41.deploy.doctor.host import Output
from vllm_ascend_dsv41.deploy.doctor.report import Status, text
from vllm_ascend_dsv41.deploy.doctor.target import Target
from vllm_ascend_dsv41.deploy.launch import command

STACK = {"vllm": "0.30.0", "vllm-ascend": "0.30.0rc2", "torch": "2.10.0", "torch-npu": "2.10.0.post4"}
HERE = {"checkpoint"}  # tested with real directories below


@pytest.fixture(autouse=True)
def stack(monkeypatch):
    """The packages of the recipe, as if installed."""
    found = dict(STACK)
    monkeypatch.setattr(software, "installed", found.get)
    return found


def states(node: Recorded, target: Target) -> dict[str, Status]:
    """By check, without the checkpoint's."""
    return {r.check: r.status for r in examine(node, target) if r.check not in HERE}


@pytest.mark.parametrize(("recipe", "rank"), [("a3x2", 0), ("a3x2", 1), ("a2x4", 0), ("a2x4", 3), ("a3x1-offload", 0)])
def test_a_healthy_server(recipe, rank):
    found = examine(healthy(recipe, rank), launched(recipe, rank))
    assert {r.check: r.found for r in found if r.status in (Status.FAIL, Status.WARN) and r.check not in HERE} == {}
    skipped = {r.check for r in found if r.status is Status.SKIP}
    assert len(skipped) <= (7 if recipe == "a3x1-offload" else 3), skipped


def of_recipe(recipe: str, change):
    """Remember whose server is changed."""
    change.recipe = recipe
    return change


def option(name: str, value: str | bool | None, rank: int = 0, recipe: str = "a3x2"):
    """The recipe's launch with one option changed, added or, with None, left out."""

    def change(node: Recorded) -> Target:
        target = launched(recipe, rank)
        options = {**target.options, name: value}
        return dataclasses.replace(target, options={k: v for k, v in options.items() if v is not None})

    return of_recipe(recipe, change)


def variable(name: str, value: str, rank: int = 0, recipe: str = "a3x2"):
    """The recipe's launch with one variable changed, or, with "", unset."""
    return of_recipe(recipe, lambda node: launched(recipe, rank, **{name: value}))


def machine(change, rank: int = 0, recipe: str = "a3x2"):
    """Another machine, by a function that changes the healthy one."""

    def make(node: Recorded) -> Target:
        change(node)
        return launched(recipe, rank)

    return of_recipe(recipe, make)


def without_devices(*numbers: int):
    return lambda node: node.empty.difference_update({f"/dev/davinci{n}" for n in numbers})


def tool(name: str, answer):
    return lambda node: node.tools.__setitem__(name, answer)


def hccn_says(what: str, device: int, said: str, a3: bool = True):
    return tool("hccn_tool", hccn(a3, 1, {(device, what): said}))


SHM_512_USED = lambda node: node.rooms.__setitem__("/dev/shm", (15 * GIB, 14 * GIB))  # noqa: E731
TCP = "  sl  local_address rem_address   st\n   0: 00000000:{:04X} 00000000:0000 0A 0\n"
DOMINO = {"memory-plan", "host-memory"}  # what a changed topology changes, too

#: number in spec/aisbench-and-launch.md 3.3 (or the word that says where it is from), check, its status, what is said,
#: what is done, how it comes about
FAULTS = [
    (
        "1",
        "start-rank",
        Status.FAIL,
        "start-rank 0 without --headless",
        "leave it out on node 0",
        option("data-parallel-start-rank", "0"),
    ),
    (
        "1",
        "start-rank",
        Status.FAIL,
        "without --data-parallel-start-rank",
        "first data-parallel rank",
        lambda node: dataclasses.replace(
            launched("a3x2", 0),
            options={**{k: v for k, v in launched("a3x2", 1).options.items() if k != "data-parallel-start-rank"}},
            node=launched("a3x2", 0).node,
        ),
    ),
    (
        "2",
        "interface",
        Status.FAIL,
        "no interface eth9",
        "set NIC_NAME",
        lambda node: dataclasses.replace(
            launched(HCCL_SOCKET_IFNAME="enp67s0f5"), node=dataclasses.replace(launched().node, nic="eth9")
        ),
    ),
    (
        "2",
        "interface",
        Status.FAIL,
        "has 10.9.9.9",
        "set LOCAL_IP",
        machine(tool("ip", ip_tool("enp67s0f5", "10.9.9.9"))),
    ),
    (
        "2",
        "interface",
        Status.FAIL,
        "is down",
        "another interface",
        machine(lambda node: node.files.__setitem__("/sys/class/net/enp67s0f5/operstate", "down\n")),
    ),
    (
        "2",
        "route",
        Status.FAIL,
        "by docker0 from 172.17.0.1",
        "NODE0_IP must be",
        machine(tool("ip", ip_tool("enp67s0f5", "10.0.0.2", "docker0", "172.17.0.1")), rank=1),
    ),
    (
        "2",
        "interface-names",
        Status.WARN,
        "fits enp189s0f0, enp67s0f5",
        "an equals sign",
        variable("HCCL_SOCKET_IFNAME", "enp"),
    ),
    (
        "2",
        "interface-names",
        Status.FAIL,
        "is no interface's beginning",
        "NIC_NAME",
        variable("HCCL_SOCKET_IFNAME", "bond"),
    ),
    ("3", "placeholders", Status.FAIL, "<NODE0_IP>", "fill in", variable("HCCL_IF_IP", "<NODE0_IP>")),
    (
        "3",
        "ranks",
        Status.FAIL,
        "node 1 starts at rank 0",
        "set NODE_RANK",
        option("data-parallel-start-rank", "0", rank=1),
    ),
    (
        "3",
        "ranks",
        Status.FAIL,
        "ranks 4 to 5 of 4",
        "same --data-parallel-size",
        option("data-parallel-start-rank", "4", rank=1),
    ),
    (
        "4",
        "ports",
        Status.FAIL,
        "127.0.0.1:8000 (--port): [Errno 98]",
        "end what listens there",
        machine(lambda node: node.ports.__setitem__(("127.0.0.1", 8000), "[Errno 98] Address already in use")),
    ),
    (
        "4",
        "ports",
        Status.FAIL,
        "10.0.0.1:13399",
        "choose another port",
        machine(lambda node: node.ports.__setitem__(("10.0.0.1", 13399), "[Errno 98] Address already in use")),
    ),
    (
        "5",
        "hccl-ports",
        Status.FAIL,
        "listened on: 60003",
        "HCCL_IF_BASE_PORT",
        machine(lambda node: node.files.__setitem__("/proc/net/tcp6", TCP.format(60003))),
    ),
    (
        "5",
        "hccl-ports",
        Status.FAIL,
        "listened on: 16666",
        "other HCCL job",
        machine(lambda node: node.files.__setitem__("/proc/net/tcp", TCP.format(16666))),
    ),
    ("5", "hccl-ports", Status.FAIL, "HCCL_IF_BASE_PORT=99", "60000", variable("HCCL_IF_BASE_PORT", "99")),
    (
        "6",
        "npu-link",
        Status.FAIL,
        "device 3 not UP: link status: DOWN",
        "check cable",
        machine(hccn_says("link", 3, "link status: DOWN\n", a3=False), recipe="a2x4"),
    ),
    (
        "7",
        "npu-net-health",
        Status.FAIL,
        "device 5: Fault",
        "gateway",
        machine(hccn_says("net_health", 5, "net health status: Fault\n", a3=False), recipe="a2x4"),
    ),
    (
        "7",
        "npu-net-health",
        Status.WARN,
        "device 0: Receive timeout",
        "probe address",
        machine(hccn_says("net_health", 0, "net health status: Receive timeout\n")),
    ),
    (
        "8",
        "npu-tls",
        Status.FAIL,
        "[0, 0, 1,",
        "-tls -s enable 0",
        machine(hccn_says("tls", 2, "dev_id:2, tls switch[1](0:disable, 1:enable)\n")),
    ),
    (
        "9",
        "npu-address",
        Status.FAIL,
        "device 1 without IPv4",
        "HCCL uses IPv4",
        machine(hccn_says("ip", 1, "Get ipconf failed, because no ip was preset there!\n", a3=False), recipe="a2x4"),
    ),
    (
        "10",
        "superpod",
        Status.WARN,
        "does not tell a superpod",
        "update npu-smi",
        machine(
            tool(
                "npu-smi",
                lambda *words: Output(
                    "This device does not support it.\n" if "spod-info" in words else npu_smi(True), 0
                ),
            )
        ),
    ),
    (
        "11",
        "timeouts",
        Status.FAIL,
        "not set: 600",
        "VLLM_ENGINE_READY_TIMEOUT_S=3600",
        variable("VLLM_ENGINE_READY_TIMEOUT_S", ""),
    ),
    ("11", "timeouts", Status.WARN, "not set: 120", "HCCL_CONNECT_TIMEOUT=1800", variable("HCCL_CONNECT_TIMEOUT", "")),
    ("11", "timeouts", Status.FAIL, "HCCL_CONNECT_TIMEOUT=9000", "1800", variable("HCCL_CONNECT_TIMEOUT", "9000")),
    (
        "11",
        "timeouts",
        Status.FAIL,
        "VLLM_ENGINE_READY_TIMEOUT_S=1h",
        "3600",
        variable("VLLM_ENGINE_READY_TIMEOUT_S", "1h"),
    ),
    (
        "12",
        "devices",
        Status.FAIL,
        "8 of /dev/davinci0 to 15",
        "--device /dev/davinciN",
        lambda node: (without_devices(*range(8, 16))(node), launched(ASCEND_RT_VISIBLE_DEVICES=""))[1],
    ),
    (
        "12",
        "devices",
        Status.FAIL,
        "one die of a card only: [0, 17]",
        "both /dev/davinci",
        lambda node: (
            without_devices(1)(node),
            node.empty.add("/dev/davinci17"),
            launched(ASCEND_RT_VISIBLE_DEVICES=""),
        )[2],
    ),
    (
        "12",
        "devices",
        Status.FAIL,
        "/dev/hisi_hdc missing",
        "--device",
        machine(lambda node: node.empty.discard("/dev/hisi_hdc")),
    ),
    (
        "13",
        "visible-devices",
        Status.FAIL,
        "no /dev/davinci16",
        "ASCEND_RT_VISIBLE_DEVICES=0,1",
        variable("ASCEND_RT_VISIBLE_DEVICES", ",".join(map(str, range(17)))),
    ),
    (
        "13",
        "visible-devices",
        Status.FAIL,
        "not ascending (EE1001)",
        "=0,1,2",
        variable("ASCEND_RT_VISIBLE_DEVICES", "1,0," + ",".join(map(str, range(2, 16)))),
    ),
    (
        "13",
        "visible-devices",
        Status.FAIL,
        "8 devices for 16 ranks",
        "=0,1,2",
        variable("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7"),
    ),
    ("13", "visible-devices", Status.FAIL, "all", "=0,1,2", variable("ASCEND_RT_VISIBLE_DEVICES", "all")),
    (
        "14",
        "npu-free",
        Status.FAIL,
        "NPU 2 chip 1: 56363 MB; processes 4005",
        "end the old server",
        machine(
            tool(
                "npu-smi",
                lambda *words: Output("\tSuper Pod ID : 3\n" if "spod-info" in words else npu_smi(True, {5: 56363}), 0),
            )
        ),
    ),
    (
        "14",
        "npu-health",
        Status.FAIL,
        "NPU 3 chip 0: Alarm",
        "until it is repaired",
        machine(
            tool(
                "npu-smi",
                lambda *words: Output(
                    "\tSuper Pod ID : 3\n" if "spod-info" in words else npu_smi(True, health={6: "Alarm"}), 0
                ),
            )
        ),
    ),
    ("15", "shm", Status.FAIL, "14.00 of 15.00 GiB free", "--shm-size=512g", machine(SHM_512_USED)),
    (
        "15",
        "shm",
        Status.WARN,
        "64 GiB",
        "--shm-size=512g",
        machine(lambda node: node.rooms.__setitem__("/dev/shm", (64 * GIB, 64 * GIB))),
    ),
    (
        "16",
        "host-memory",
        Status.FAIL,
        "100 GiB (MemAvailable)",
        "dp_shared_memory",
        machine(
            lambda node: node.files.__setitem__("/proc/meminfo", f"MemAvailable: {100 << 20} kB\n"),
            recipe="a3x1-offload",
        ),
    ),
    (
        "16",
        "host-memory",
        Status.FAIL,
        "120 GiB (control group",
        "docker run --memory",
        machine(
            lambda node: node.files.__setitem__("/sys/fs/cgroup/docker/1234/memory.max", f"{120 * GIB + 1000000}\n"),
            recipe="a3x1-offload",
        ),
    ),
    (
        "17",
        "memory-plan",
        Status.FAIL,
        "graphs and context need",
        "dsv41 plan",
        option("gpu-memory-utilization", "0.99", recipe="a2x4"),
    ),
    (
        "17",
        "memory-plan",
        Status.FAIL,
        "GiB more than 0.90 of a device",
        "dsv41 plan",
        option("max-num-batched-tokens", "32768", recipe="a2x4"),
    ),
    (
        "18",
        "cpu-binding",
        Status.WARN,
        "enable_cpu_binding with Engram tables in host memory",
        "set enable_cpu_binding to false",
        option("additional-config", '{"enable_cpu_binding":true}', recipe="a3x1-offload"),
    ),
    (
        "19",
        "concurrency",
        Status.WARN,
        "--max-num-seqs 32 on one server",
        "begin with --max-num-seqs 4",
        of_recipe(
            "a3x1-offload",
            lambda node: dataclasses.replace(
                launched("a3x1-offload", HCCL_BUFFSIZE="256"),
                options={**launched("a3x1-offload").options, "max-num-seqs": "32"},
            ),
        ),
    ),
    (
        "20",
        "engram",
        Status.FAIL,
        "enable_engram, engram_storage",
        "cpu_offload",
        option("additional-config", '{"enable_engram":true,"engram_storage":"int8"}'),
    ),
    (
        "20",
        "engram",
        Status.FAIL,
        "--engram-config with offload",
        "leave the others out",
        option("engram-config", '{"cpu_offload":false,"offload":true}'),
    ),
    (
        "20",
        "engram",
        Status.WARN,
        "no --engram-config",
        "cpu_offload",
        lambda node: dataclasses.replace(
            launched(),
            options={k: v for k, v in launched().options.items() if k not in ("engram-config", "additional-config")},
        ),
    ),
    (
        "20",
        "engram",
        Status.WARN,
        "2 copies of 206 GiB",
        "dp_shared_memory",
        option("engram-config", '{"cpu_offload":true}', recipe="a3x1-offload"),
    ),
    (
        "21",
        "driver",
        Status.WARN,
        "driver 24.1.rc2",
        "update driver",
        machine(lambda node: node.files.__setitem__("/usr/local/Ascend/driver/version.info", "Version=24.1.rc2\n")),
    ),
    (
        "21",
        "driver",
        Status.FAIL,
        "is missing or a folder",
        "docker run -v",
        machine(lambda node: node.files.pop("/usr/local/Ascend/driver/version.info")),
    ),
    (
        "21",
        "driver",
        Status.WARN,
        "firmware 6.4.0",
        "firmware of the same HDK",
        machine(
            lambda node: node.files.__setitem__(
                "/usr/local/Ascend/firmware/version.info", "Version=6.4.0.1.220\nfirmware_version=1.0\n"
            )
        ),
    ),
    (
        "21",
        "cann",
        Status.FAIL,
        "no ascend_toolkit_install.info",
        "set_env.sh",
        machine(lambda node: node.files.pop("/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info")),
    ),
    (
        "21",
        "cann",
        Status.WARN,
        "CANN 8.3.RC2",
        "image",
        machine(
            lambda node: node.files.__setitem__(
                "/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info", "version=8.3.RC2\n"
            )
        ),
    ),
    (
        "22",
        "preload",
        Status.FAIL,
        "names /usr/lib/libjemalloc.so",
        "libjemalloc2",
        variable("LD_PRELOAD", "/usr/lib/libjemalloc.so"),
    ),
    ("23", "proxy", Status.WARN, "http_proxy set", "unset http_proxy", variable("http_proxy", "http://proxy:3128")),
    (
        "25",
        "runner",
        Status.FAIL,
        "VLLM_USE_V2_MODEL_RUNNER=1",
        "VLLM_USE_V2_MODEL_RUNNER=0",
        variable("VLLM_USE_V2_MODEL_RUNNER", "1"),
    ),
    (
        "25",
        "runner",
        Status.FAIL,
        "--pipeline-parallel-size 2",
        "divide by tensor",
        option("pipeline-parallel-size", "2"),
    ),
    (
        "27",
        "tuning",
        Status.WARN,
        "1 settings",
        "transparent_hugepage",
        machine(
            lambda node: node.files.__setitem__(
                "/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"
            )
        ),
    ),
    (
        "27",
        "tuning",
        Status.WARN,
        "3 settings",
        "numa_balancing=0",
        machine(
            lambda node: node.files.update(
                {
                    "/proc/sys/kernel/numa_balancing": "1\n",
                    "/proc/sys/vm/swappiness": "60\n",
                    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "ondemand\n",
                }
            )
        ),
    ),
    (
        "problems",
        "host-registration",
        Status.FAIL,
        "kernel 4.19.90",
        "update the kernel",
        machine(
            lambda node: node.files.__setitem__("/proc/sys/kernel/osrelease", "4.19.90-vhulk2211\n"),
            recipe="a3x1-offload",
        ),
    ),
    (
        "problems",
        "host-registration",
        Status.WARN,
        "host_mem_pool is 0 on dev7",
        "cpu_offload false",
        machine(
            lambda node: node.files.__setitem__("/proc/svm/dev7/feature/host_mem_pool", "0\n"), recipe="a3x1-offload"
        ),
    ),
    (
        "problems",
        "host-registration",
        Status.WARN,
        "limited to 65536",
        "memlock=-1",
        machine(
            lambda node: node.files.update(
                {
                    "/proc/self/limits": node.files["/proc/self/limits"].replace(
                        "Max locked memory         unlimited", "Max locked memory         65536"
                    ),
                    "/proc/self/status": "CapEff:\t00000000a80425fb\n",
                }
            ),
            recipe="a3x1-offload",
        ),
    ),
    (
        "problems",
        "plugins",
        Status.FAIL,
        "VLLM_PLUGINS=dsv41,ascend",
        "unset VLLM_PLUGINS",
        variable("VLLM_PLUGINS", "dsv41,ascend"),
    ),
    (
        "problems",
        "plugins",
        Status.FAIL,
        "VLLM_PLUGINS=ascend_kv_connector",
        "add dsv41",
        variable("VLLM_PLUGINS", "ascend_kv_connector"),
    ),
    ("problems", "memory-plan", Status.FAIL, "HCCL_BUFFSIZE 100", "dsv41 plan", variable("HCCL_BUFFSIZE", "100")),
    ("issue 9", "remote-code", Status.WARN, "--trust-remote-code", "leave it out", option("trust-remote-code", True)),
    ("issue 9", "remote-code", Status.FAIL, "--load-format pt", "leave it out", option("load-format", "pt")),
    ("issue 9", "access", Status.WARN, "--host 0.0.0.0 without an API key", "VLLM_API_KEY", option("host", "0.0.0.0")),
    ("issue 9", "access", Status.WARN, "process list", "export VLLM_API_KEY", option("api-key", "secret")),
    (
        "issue 9",
        "access",
        Status.WARN,
        "8.8.8.8 is a public address",
        "firewall",
        option("data-parallel-address", "8.8.8.8"),
    ),
    ("issue 9", "access", Status.FAIL, "VLLM_SERVER_DEV_MODE", "unset", variable("VLLM_SERVER_DEV_MODE", "1")),
    (
        "issue 9",
        "open-files",
        Status.WARN,
        "1024 open files",
        "ulimit -n",
        machine(
            lambda node: node.files.__setitem__(
                "/proc/self/limits", "Max open files            1024                 4096                 files\n"
            )
        ),
    ),
    (
        "26",
        "recipe",
        Status.WARN,
        "--tensor-parallel-size 4",
        "the same on all nodes",
        lambda node: launched(
            given=[
                *("dsv41", "serve"),
                *command(launched().recipe, launched().node, "/data/weights").arguments,
                *("--tensor-parallel-size", "4"),
            ]
        ),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{f[0]}-{f[1]}-{n}" for n, f in enumerate(FAULTS)])
def test_a_fault_is_seen_by_its_check_and_by_no_other(fault):
    _, check, status, said, remedy, change = fault
    recipe = getattr(change, "recipe", "a3x2")
    target = change(healthy(recipe))
    node = healthy(recipe, target.node.rank)
    target = change(node)
    found = {r.check: r for r in examine(node, target) if r.check not in HERE}
    assert found[check].status is status, found[check]
    assert said in found[check].found
    assert remedy in found[check].remedy or remedy in found[check].expected
    others = {name: r for name, r in found.items() if r.status in (Status.FAIL, Status.WARN) and name != check}
    if check == "recipe":
        others = {name: r for name, r in others.items() if name not in DOMINO}
    assert others == {}


def test_every_failure_of_the_spec_has_a_fixture():
    """Of spec 3.3: those that need no NPU, and those that a tool's answer shows. 4 both ways and 26: test_peers; 24: below;
    28: below; 10 between nodes: test_peers."""
    numbers = {fault[0] for fault in FAULTS}
    assert {str(n) for n in range(1, 28)} - numbers == {"24"}
    assert {fault[1] for fault in FAULTS} == set(checks.CHECKS) - HERE - {"packages"}


def test_packages(stack):
    stack["torch-npu"] = "2.14.0"
    result = next(r for r in examine(healthy(), launched()) if r.check == "packages")
    assert result.status is Status.WARN
    assert "torch-npu 2.14.0" in result.found
    del stack["vllm-ascend"]
    stack["torch-npu"] = STACK["torch-npu"]
    result = next(r for r in examine(healthy(), launched()) if r.check == "packages")
    assert result.status is Status.FAIL
    assert "image" in result.remedy


def test_no_driver_at_all():
    """A machine without NPUs: what is missing is said, and nothing raises."""
    bare = Recorded(rooms={"/dev/shm": (GIB, GIB)})
    found = {r.check: r for r in examine(bare, launched())}
    assert found["npu-health"].status is Status.FAIL
    assert "npu-smi is not there" in found["npu-health"].found
    assert found["devices"].status is Status.FAIL
    assert found["npu-link"].status is Status.SKIP


def test_npu_smi_that_answers_with_an_error():
    node = healthy()
    node.tools["npu-smi"] = lambda *words: Output(
        "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi model initialized failed, because the device is used. ret is -8020\n",
        1,
    )
    found = {r.check: r for r in examine(node, launched())}
    assert "device is used" in found["npu-health"].found
    node.tools["hccn_tool"] = lambda *words: Output("", None)  # it did not end in time
    found = {r.check: r for r in examine(node, launched())}
    assert "no answer" in found["npu-link"].found


def test_a_card_that_has_dropped_off():
    node = healthy()
    lines = npu_smi(True).splitlines()
    kept = [line for line in lines if not line.startswith("| 3 ") and ":8" not in line[:40]]
    node.tools["npu-smi"] = lambda *words: Output(
        "\tSuper Pod ID : 3\n" if "spod-info" in words else "\n".join(kept), 0
    )
    found = {r.check: r for r in examine(node, launched())}
    assert found["npu-health"].status is Status.FAIL
    assert "dropped off" in found["npu-health"].remedy


def test_a_server_without_iproute2():
    node = healthy(rank=1)
    del node.tools["ip"]
    found = {r.check: r for r in examine(node, launched(rank=1))}
    assert found["interface"].status is found["route"].status is Status.SKIP


def test_devices_are_called_by_their_numbers():
    node = healthy("a2x4")
    node.tools["hccn_tool"] = hccn(False, 1, {(6, "link"): "link status: DOWN\n"})
    target = launched("a2x4", ASCEND_RT_VISIBLE_DEVICES="4,5,6,7")
    found = {r.check: r for r in examine(node, target)}
    assert found["npu-link"].found.startswith("device 6 not UP")


def test_secrets_are_not_told():
    words = [
        *command(launched().recipe, launched().node, "/m").arguments,
        "--api-key",
        "sk-secret",
        "--hf-token",
        "hf_secret",
    ]
    target = launched(
        given=["dsv41", "serve", *words], VLLM_API_KEY="secret<x>", HCCL_PASSWD="secret", VLLM_PROXY="http://u:secret@h"
    )
    told = json.dumps([r.as_json() for r in examine(healthy(), target)]) + json.dumps(facts(healthy(), target))
    assert "secret" not in told
    assert "--api-key ***" in told


def test_an_answer_that_no_check_expects():
    node = healthy("a3x1-offload")
    node.files["/proc/self/status"] = "CapEff:\tzz\n"
    found = {r.check: r for r in examine(node, launched("a3x1-offload"))}
    assert found["host-registration"].status is Status.FAIL
    assert "this check failed itself: ValueError" in found["host-registration"].found
    assert found["shm"].status is Status.PASS


def test_npu_smi_26():
    """Wider columns, and one more for processes."""
    wide = (
        "| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |\n"
        "| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |\n"
        "| 7     Ascend910           | Warning       | -                    35                      0    / 0                |\n"
        "| 1     15                  | 0000:83:00.0  | 0                    0    / 0                31877/ 65536            |\n"
    )
    assert [(d.card, d.chip, d.health, d.used_mb) for d in dies(wide)] == [(0, 0, "OK", 3419), (7, 1, "Warning", 31877)]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda root: next(root.glob("quant_model_weights-00001*")).unlink(), "files that the index names are missing"),
        (lambda root: (root / "quant_model_description.json").unlink(), "quant_model_description.json is missing"),
        (lambda root: (root / "config.json").unlink(), "config.json"),
    ],
)
def test_checkpoint(converted, tmp_path, damage, said):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(converted("a", "w8a8"), copy)
    target = dataclasses.replace(launched("cpu-demo"), model=str(copy))
    assert checks.CHECKS["checkpoint"](healthy(), target).status is Status.PASS
    damage(copy)
    result = checks.CHECKS["checkpoint"](healthy(), target)
    assert result.status is Status.FAIL
    assert said in result.found
    assert "dsv41" in result.remedy


def test_the_official_checkpoint_is_not_for_npus(official):
    target = dataclasses.replace(launched("cpu-demo"), model=str(official("a")))
    result = checks.CHECKS["checkpoint"](healthy(), target)
    assert result.status is Status.FAIL
    assert "dsv41 quantize" in result.remedy


def test_image():
    node = Recorded(tools={"docker": lambda *words: Output("no such manifest: quay.io/ascend/vllm-ascend:gone\n", 1)})
    assert software.image_there(node, "quay.io/ascend/vllm-ascend:gone").status is Status.FAIL
    node.tools["docker"] = lambda *words: Output("{}", 0)
    assert software.image_there(node, "x").status is Status.PASS
    assert software.image_there(Recorded(), "x").status is Status.SKIP


def test_options_that_cannot_be_read():
    target = dataclasses.replace(launched(), options={**launched().options, "engram-config": "{cpu_offload:true}"})
    found = {r.check: r for r in examine(healthy(), target)}
    assert found["engram"].status is Status.FAIL
    assert "no JSON" in found["engram"].found


def test_compare_names_what_differs():
    """Options, environment, driver, checkpoint, interface and TLS switch of two nodes."""
    node, other = healthy(rank=0), healthy(rank=1)
    other.tools["hccn_tool"] = hccn(True, 2, {(n, "tls"): f"dev_id:{n}, tls switch[1](0:disable)\n" for n in range(16)})
    other.files["/usr/local/Ascend/driver/version.info"] = "Version=25.5.1\n"
    one = launched(rank=0)
    two = dataclasses.replace(
        launched(rank=1, OMP_NUM_THREADS="8", VLLM_API_KEY="secret"),
        options={**launched(rank=1).options, "max-num-seqs": "16"},
    )
    assert {r.status for r in compare({"0": facts(node, one), "1": facts(healthy(rank=1), launched(rank=1))})} == {
        Status.PASS
    }
    mine, theirs = facts(node, one), facts(other, two)
    theirs["network"]["NIC_NAME"] = "eth1"
    theirs["checkpoint"] = {"weights": "other"}
    found = {r.check: r for r in compare({"0": mine, "1": theirs})}
    assert "max-num-seqs: 32 / 16" in found["same-options"].found
    assert "TLS switch: ['0'] / ['1']" in found["same-ascend"].found
    assert "driver: 26.0.rc1 / 25.5.1" in found["same-ascend"].found
    assert found["same-checkpoint"].status is Status.FAIL
    assert found["same-environment"].status is Status.WARN
    assert "OMP_NUM_THREADS" in found["same-environment"].found
    assert found["same-network"].status is Status.WARN
    assert "secret" not in json.dumps(theirs)


def test_the_command(converted, tmp_path, capsys, monkeypatch):
    """On this machine, with the real stack: seconds, JSON, comparison of two reports, secrets left out."""
    monkeypatch.undo()  # the real packages
    monkeypatch.setenv("VLLM_API_KEY", "very-secret")
    checkpoint = str(converted("a", "w8a8"))
    assert main(["doctor", "cpu-demo", "--model", checkpoint]) == 0
    out = capsys.readouterr().out
    assert "PASS  checkpoint" in out
    assert "0 FAIL" in out
    reports = []
    for number in range(2):
        assert main(["doctor", "cpu-demo", "--model", checkpoint, "--json"]) == 0
        report = capsys.readouterr().out
        assert "very-secret" not in report
        reports.append(str(tmp_path / f"{number}.json"))
        Path(reports[-1]).write_text(report)
    assert main(["doctor", "compare", *reports]) == 0
    assert "7 PASS, 0 WARN, 0 FAIL" in capsys.readouterr().out
    broken = json.loads(Path(reports[1]).read_text())
    for changed in ({"fingerprint": {}}, {"fingerprint": {**broken["fingerprint"], "options": None}}):
        (tmp_path / "broken.json").write_text(json.dumps({**broken, **changed}))
        assert main(["doctor", "compare", reports[0], str(tmp_path / "broken.json")]) == 1
        assert "no report of" in capsys.readouterr().err
    damaged = json.loads(Path(reports[1]).read_text())
    damaged["fingerprint"]["options"]["max-num-seqs"] = "5"
    Path(reports[1]).write_text(json.dumps(damaged))
    assert main(["doctor", "compare", *reports]) == 1
    assert "max-num-seqs: 4 / 5" in capsys.readouterr().out
    assert main(["doctor"]) in (0, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "one.json"], "two nodes or more"),
        (["compare", "README.md", "README.md"], "no report of"),
        (["a3"], "did you mean a3x2?"),
        (["a3x2", "a2x4"], "one recipe"),
        (["a3x2"], "fill in this server's values"),
        (["a3x2", "--node-rank", "one"], "node rank 'one'"),
        (
            [
                "a3x2",
                "--node-rank",
                "7",
                "--node0-ip",
                "1.1.1.1",
                "--local-ip",
                "1.1.1.2",
                "--nic",
                "e",
                "--model",
                "/m",
            ],
            "nodes 0 to 1",
        ),
        (["--lint-command", "nowhere.sh"], "No such file"),
        (["--", "dsv41", "serve", "m"], "need a RECIPE"),
    ],
)
def test_bad_use(words, said, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["doctor", *words]) == 1
    assert said in capsys.readouterr().err


def test_the_text_names_expected_and_remedy():
    found = examine(healthy(), launched(VLLM_USE_V2_MODEL_RUNNER="1"))
    shown = text(found, "0")
    line = shown.index("FAIL  runner")
    assert "expected: 0: drafts" in shown[line:]
    assert "remedy:   export VLLM_USE_V2_MODEL_RUNNER=0" in shown[line:]
