"""Where pages of host memory lie: placing them before they are touched, and counting them afterwards.

System calls by number (man 2 mbind): the C library has no wrapper, and libnuma need not be installed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

NODES = Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
SAMPLE = 1 << 16
_PREFERRED, _INTERLEAVE = 1, 3  # of linux/mempolicy.h
_libc = ctypes.CDLL(None, use_errno=True)


def parse_list(text: str) -> list[int]:
    """``0-3,8`` -> [0, 1, 2, 3, 8], the kernel's way to write processors and nodes."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def nodes() -> list[int]:
    """Nodes with memory; [0] where the kernel knows none."""
    try:
        return parse_list((NODES / "has_memory").read_text()) or [0]
    except OSError:
        return [0]


def bind(address: int, size: int, where: list[int]) -> None:
    """Choose the nodes of the pages of [address, address + size) that are touched from now on: ``where`` one, that one
    while it has memory; several, these in turn; none, the toucher's own while it has memory, whatever the process is
    bound to. Raises OSError, PermissionError where a container forbids it."""
    mask = (ctypes.c_ulong * 16)()
    for node in where:
        mask[node // 64] |= 1 << node % 64
    mode = _INTERLEAVE if len(where) > 1 else _PREFERRED
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(size), mode, mask, ctypes.c_ulong(len(mask) * 64 + 1), 0)
    if _libc.syscall(ctypes.c_long(_MBIND[platform.machine()]), *arguments):
        number = ctypes.get_errno()  # OSError becomes PermissionError by this number
        raise OSError(number, f"mbind to nodes {where}: {os.strerror(number)}")


def placement(address: int, size: int) -> dict[int, int]:
    """Bytes of [address, address + size) on each node, of the pages that are there; from a sample of at most 65,536
    pages (man 2 move_pages, which moves nothing here). Empty where the kernel does not say."""
    page = mmap.PAGESIZE
    pages = -(-size // page)
    step = -(-pages // SAMPLE)
    count = -(-pages // step)
    where = (ctypes.c_void_p * count)(*range(address, address + size, step * page))
    status = (ctypes.c_int * count)()
    call = ctypes.c_long(_MOVE_PAGES[platform.machine()])
    if _libc.syscall(call, 0, ctypes.c_ulong(count), where, None, status, 0):
        return {}
    share = size / count
    return {node: round(share * times) for node, times in sorted(Counter(status).items()) if node >= 0}


def node_of_npu(device: int) -> int | None:
    """The node that an NPU hangs on, from the processors that ``npu-smi info -t topo`` calls its own; None if it cannot
    be told. ``device`` counts as CANN does, after ASCEND_RT_VISIBLE_DEVICES."""
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    tool = shutil.which("npu-smi")
    if tool is None:
        return None
    try:
        number = parse_list(visible)[device] if visible else device
        command = [tool, "info", "-t", "topo"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (IndexError, ValueError, OSError, subprocess.SubprocessError):
        return None
    row = re.search(rf"^NPU{number}\s.*?([\d,-]+)\s*$", text, re.MULTILINE)
    if row is None or not row[1][0].isdigit():
        return None
    processor = parse_list(row[1])[0]
    for folder in NODES.glob("node[0-9]*"):
        if processor in parse_list((folder / "cpulist").read_text()):
            return int(folder.name.removeprefix("node"))
    return None
