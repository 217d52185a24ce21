"""What this machine allows, asked before an Engram table is made: a start that fails after minutes costs most."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from .memory import EngramMemoryError

RESERVE = 4 << 30  # of the node's memory, at most, for all else that starts up meanwhile
CAP_IPC_LOCK = 14  # bit of CapEff (man 7 capabilities): limits of locked memory do not apply


def maps_anonymous_memory(release: str | None = None) -> bool:
    """Whether CANN can register memory that it has not allocated: from kernels after 5.10 on (CANN runtime, api_ref
    11-02, aclrtHostRegister)."""
    numbers = re.match(r"(\d+)\.(\d+)", release or os.uname().release)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) > (5, 10)


@dataclass(frozen=True)
class Available:
    """Bytes that may still be taken, and which limit that is."""

    bytes: int
    limit: str


def machine() -> Available:
    """What the machine can give without swapping."""
    return Available(psutil.virtual_memory().available, "MemAvailable of /proc/meminfo")


def control_group(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), read: Callable[[Path], str] = Path.read_text
) -> Available | None:
    """The tightest limit on the control groups of this process; None where there is none. ``read``: of a file, raising
    OSError where there is none."""
    tightest: Available | None = None
    for folder, limit, usage, cache in _memory_groups(proc, cgroups, read):
        try:
            allowed, used = int(read(folder / limit)), int(read(folder / usage))
            statistics = read(folder / "memory.stat")
        except (OSError, ValueError):  # no such group, or `max`
            continue
        cached = sum(int(size) for size in re.findall(rf"^{cache} (\d+)$", statistics, re.MULTILINE))
        left = max(allowed - used + cached, 0)
        if tightest is None or left < tightest.bytes:
            tightest = Available(left, f"{folder / limit} = {allowed:,}")
    return tightest


def _memory_groups(proc: Path, cgroups: Path, read: Callable[[Path], str]) -> list[tuple[Path, str, str, str]]:
    """Control groups of this process and their parents: folder, files of limit and usage, keys of the page cache."""
    found = []
    try:
        lines = read(proc / "self/cgroup").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, root = ("memory.max", "memory.current", "(?:in)?active_file"), cgroups
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_(?:in)?active_file")
            root = cgroups / "memory"
        else:
            continue
        folder = root / path.lstrip("/")
        found += [(parent, *names) for parent in (folder, *folder.parents) if parent.is_relative_to(root)]
    return found


def container() -> str:
    """The same for processes of one container, which have their control groups in common."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


def check_memory(need: int, ranks: int, limit: Available) -> None:
    """Raise EngramMemoryError unless the tables of ``ranks`` ranks under one limit, ``need`` bytes, fit."""
    if need + min(RESERVE, need // 10) > limit.bytes:
        raise EngramMemoryError(
            f"the Engram tables of {ranks} ranks of this machine need {need / 2**30:,.1f} GiB of host memory, and some "
            f"must stay free; there are {limit.bytes / 2**30:,.1f} GiB ({limit.limit}). Share one copy between "
            "data-parallel ranks (--engram-config '{\"dp_shared_memory\": true}'), keep tables in device memory "
            "('{\"cpu_offload\": false}'), or raise the limit"
        )


def registration_warnings(size: int, proc: Path = Path("/proc")) -> list[str]:
    """What may keep a device from mapping ``size`` bytes of host memory, although it mapped a few."""
    warnings = []
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    capabilities = re.search(r"^CapEff:\s*(\w+)", (proc / "self/status").read_text(), re.MULTILINE)
    free = capabilities is not None and int(capabilities[1], 16) >> CAP_IPC_LOCK & 1
    if locked not in (resource.RLIM_INFINITY, -1) and locked < size and not free:
        warnings.append(
            f"this process may lock {locked:,} bytes of memory and registers {size:,}; drivers that count them refuse: "
            "ulimit -l unlimited (docker run --ulimit memlock=-1)"
        )
    for device in sorted(proc.glob("svm/dev*")):
        file = device / "feature/host_mem_pool"
        try:
            pool = file.read_text().strip()
        except OSError:
            pool = "missing"
        if pool in ("missing", "0", "N", "n", "false"):
            warnings.append(
                f"{file} is {pool}: this driver maps host memory without a pool; on A2 large tables were seen to fail "
                "so, after minutes. Update driver and firmware (HDK) if that happens"
            )
    return warnings
