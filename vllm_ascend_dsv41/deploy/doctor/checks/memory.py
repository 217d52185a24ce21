"""Memory of device and host: the plan against what is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

from ....engram.limits import CAP_IPC_LOCK, control_group, maps_anonymous_memory
from ....layer_plan import ConfigError
from ....quant import CheckpointError
from ...plan import plan as memory_plan
from ...plan.device import GIB
from ...plan.memory import MemoryPlan
from ..host import Host
from ..report import Result, bad, good, skip, warn
from ..target import Target, as_recipe

SHM_PER_RANK, SHM_GOOD = GIB, 128 * GIB
_PLANS: WeakKeyDictionary[Target, tuple[MemoryPlan | None, str]] = WeakKeyDictionary()
_PLANNING = Lock()


def _plan(target: Target) -> tuple[MemoryPlan | None, str]:
    """The plan of what is launched, made once."""
    with _PLANNING:
        known = _PLANS.get(target)
        if known is None:
            known = _PLANS[target] = _make_plan(target)
    return known


def _make_plan(target: Target) -> tuple[MemoryPlan | None, str]:
    """With the checkpoint's sizes where it can be read."""
    if target.recipe is None:
        return None, "no recipe named"
    path = Path(target.model)
    try:
        return memory_plan(as_recipe(target.recipe, target), path if (path / "config.json").is_file() else None), ""
    except (CheckpointError, ConfigError, ValueError, KeyError, TypeError) as error:
        return None, f"no plan: {error}"


def device_memory(host: Host, target: Target) -> Result:
    """Whether weights, cache and graphs fit a device."""
    name = "memory-plan"
    found, why = _plan(target)
    if found is None:
        return skip(name, why)
    problems = [text for text in found.problems if not text.startswith("a node needs")]
    if problems:
        return bad(
            name,
            problems[0],
            "a plan that fits (dsv41 plan)",
            "; ".join(problems[1:]) or "change what it names; dsv41 plan RECIPE --set key=value tries values",
        )
    tight = [note for note in found.notes if note.startswith("headroom")]
    if tight:
        return warn(name, tight[0], "a GiB and more", "lower --gpu-memory-utilization to 0.90")
    sequences = found.limits["sequences_at_max_model_len"]
    return good(name, f"fits, by estimate: cache for {sequences} sequences of the longest length")


def host_memory(host: Host, target: Target) -> Result:
    """MemAvailable and the container's limit against tables and processes."""
    name = "host-memory"
    found, why = _plan(target)
    if found is None:
        return skip(name, why)
    needed = sum(part.bytes for part in found.host if part.name != "reserve")
    limits = []
    available = re.search(r"^MemAvailable:\s*(\d+) kB", host.text("/proc/meminfo") or "", re.MULTILINE)
    if available:
        limits.append((int(available[1]) * 1024, "MemAvailable"))
    group = control_group(read=_read(host))
    if group is not None:
        limits.append((group.bytes, f"control group, {group.limit}"))
    if not limits:
        return skip(name, "neither /proc/meminfo nor a control group can be read")
    least, what = min(limits)
    if target.recipe is not None and target.recipe.device == "cpu":
        needed = sum(part.bytes for part in found.rank if part.name != "headroom")
    if needed > least:
        return bad(
            name,
            f"{least / GIB:.0f} GiB ({what})",
            f"{needed / GIB:.0f} GiB: "
            f"{', '.join(f'{part.name} {part.bytes / GIB:.0f}' for part in found.host if part.name != 'reserve')}",
            "share one copy of the tables (dp_shared_memory), keep them in device memory (cpu_offload false), "
            "end other processes, or raise the container's limit (docker run --memory)",
        )
    return good(name, f"{needed / GIB:.0f} of {least / GIB:.0f} GiB ({what})")


def _read(host: Host) -> Callable[[Path], str]:
    def read(path: Path) -> str:
        text = host.text(str(path))
        if text is None:
            raise FileNotFoundError(path)
        return text

    return read


def shared_memory(host: Host, target: Target) -> Result:
    """/dev/shm: workers and HCCL talk through it."""
    name = "shm"
    room = host.room("/dev/shm")
    if room is None:
        return bad(name, "no /dev/shm", "a tmpfs", "docker run --shm-size=512g")
    size, free = room
    need = max(target.devices, 1) * SHM_PER_RANK if target.on_npu else GIB // 16
    if free < need:
        return bad(
            name,
            f"/dev/shm: {free / GIB:.2f} of {size / GIB:.2f} GiB free",
            f"{need / GIB:.2f} GiB and more",
            "docker run --shm-size=512g; in Kubernetes an emptyDir with medium Memory: too small, ranks hang or "
            "RPC calls time out",
        )
    if target.on_npu and size < SHM_GOOD:
        return warn(
            name,
            f"/dev/shm: {size / GIB:.0f} GiB",
            "128 GiB and more; the guide gives 512",
            "docker run --shm-size=512g (15 GiB was too small, vllm-ascend PR 8693)",
        )
    return good(name, f"/dev/shm: {free / GIB:.1f} GiB free")


def registration(host: Host, target: Target) -> Result:
    """What may keep devices from reading tables in host memory."""
    name = "host-registration"
    if not target.on_npu or not target.json("engram-config").get("cpu_offload", True):
        return skip(name, "no tables in host memory that a device reads")
    kernel = (host.text("/proc/sys/kernel/osrelease") or "").strip()
    old = kernel and not maps_anonymous_memory(kernel)
    if old and target.json("engram-config").get("dp_shared_memory"):
        return bad(
            name,
            f"kernel {kernel}",
            "newer than 5.10 for one shared copy: CANN registers only what it allocates on older ones",
            "update the kernel, or leave dp_shared_memory out",
        )
    pools = {
        device: (host.text(f"/proc/svm/{device}/feature/host_mem_pool") or "").strip()
        for device in host.names("/proc/svm")
        if device.startswith("dev")
    }
    without = [device for device, value in pools.items() if value == "0"]
    status = host.text("/proc/self/status") or ""
    capabilities = re.search(r"^CapEff:\s*(\w+)", status, re.MULTILINE)
    may_lock = capabilities is not None and bool(int(capabilities[1], 16) >> CAP_IPC_LOCK & 1)
    locked = re.search(r"^Max locked memory\s+(\S+)", host.text("/proc/self/limits") or "", re.MULTILINE)
    if locked and locked[1] != "unlimited" and not may_lock:
        return warn(
            name,
            f"locked memory limited to {locked[1]} bytes",
            "unlimited",
            "docker run --ulimit memlock=-1, or ulimit -l unlimited",
        )
    if without:
        return warn(
            name,
            f"host_mem_pool is 0 on {', '.join(without)}",
            "1 (A3): large tables were seen to fail without, after minutes",
            "keep tables in device memory (cpu_offload false), or update driver and firmware and try dsv41 selftest",
        )
    return good(name, f"kernel {kernel}, host_mem_pool on {len(pools) - len(without)} devices")


CHECKS: dict[str, Callable[[Host, Target], Result]] = {
    "memory-plan": device_memory,
    "host-memory": host_memory,
    "shm": shared_memory,
    "host-registration": registration,
}
