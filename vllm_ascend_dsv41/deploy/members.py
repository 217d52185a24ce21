"""Processes that ``dsv41 selftest`` starts: their output goes to files, and they end with the command."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

RESULT = "DSV41_RESULT"  # environment variable: the file that a process writes its result to
# of a launcher or a serving script around us: they would make a process wait for others that do not come
FOREIGN = re.compile(r"TORCHELASTIC_|VLLM_DP_|RANK_TABLE_FILE$|DSV41_RESULT$")
CAUSE = re.compile(r"^(?:\[rank\d+\]: *)?(?:[\w.]+(?:Error|Exception)\b.*|E[A-Z]\d{4}:.*)$")  # Python's, CANN's
PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl  # bound here: between fork and exec nothing may be looked up


class MemberError(RuntimeError):
    """A process failed or did not finish; the message says which, why, and where its log is."""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory that is kept when what happens in it fails: the logs are in it."""
    directory = Path(tempfile.mkdtemp(prefix="dsv41-selftest-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def _dies_with_its_parent() -> None:
    _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


def reason(returncode: int, log: Path) -> str:
    """Why a process ended, in one line: a signal, the last error that its log names, or its last line."""
    if returncode < 0:
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else f"signal {-returncode}"
        return f"killed by {name}" + (" (out of memory?)" if returncode == -signal.SIGKILL else "")
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    named = [line for line in lines if CAUSE.match(line)]
    return named[-1] if named else lines[-1] if lines else f"status {returncode}, no output"


def run_members(
    module: str, arguments: Sequence[str], environments: Sequence[dict[str, str]], directory: Path, limit: float
) -> str:
    """``python -m module arguments`` once for each environment, at the same time.

    Returns what the first wrote to the file named by ``DSV41_RESULT``. Raises MemberError with the first that failed,
    or with those that did not finish within ``limit`` seconds.
    """
    common = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    command = [sys.executable, "-m", module, *arguments]
    members: list[subprocess.Popen[bytes]] = []
    logs = [directory / f"process{number}.log" for number in range(len(environments))]
    result = directory / "result.json"
    try:
        for own, log in zip(environments, logs, strict=True):
            with log.open("wb") as output:
                members.append(
                    subprocess.Popen(
                        command,
                        env={**common, **own, RESULT: str(result) if not members else os.devnull},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        preexec_fn=_dies_with_its_parent,
                    )
                )
        _wait(members, logs, limit)
    finally:
        for member in members:
            member.kill()
            member.wait()
    return result.read_text(encoding="utf-8")


def _wait(members: list[subprocess.Popen[bytes]], logs: list[Path], limit: float) -> None:
    deadline = time.monotonic() + limit
    while any(member.poll() is None for member in members):
        if any(member.poll() for member in members) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for number, member in enumerate(members):
        if code := member.poll():
            why, log = reason(code, logs[number]), logs[number]
            raise MemberError(f"process {number} of {len(members)} failed: {why}; its log: {log}")
    late = [number for number, member in enumerate(members) if member.poll() is None]
    if late:
        last = (logs[late[0]].read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"])[-1]
        raise MemberError(
            f"processes {late} of {len(members)} did not finish within {limit:.0f} s; process {late[0]} last said: "
            f"{last}; its log: {logs[late[0]]}"
        )
