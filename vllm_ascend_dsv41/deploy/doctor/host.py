"""The one place where the doctor touches a machine: files, tools, sockets. Tests put recorded nodes in its place."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

TOOL_TIMEOUT_S = 4.0
LONGEST = 1 << 20  # bytes of an answer that are read
PING_TIMEOUT_S = 30.0  # hccn_tool itself asks up to a minute, and a shorter wait would take a slow answer for none
#: Where tools lie that are not on PATH in every container.
TOOLS = {"hccn_tool": "/usr/local/Ascend/driver/tools/hccn_tool", "npu-smi": "/usr/local/bin/npu-smi"}


@dataclass(frozen=True)
class Output:
    """What a tool said, both streams; ``status`` None: it did not end in time."""

    text: str
    status: int | None


class Host(Protocol):
    """What checks may ask of a machine. Absolute paths; None: it is not there, or may not be read."""

    environment: Mapping[str, str]

    def text(self, path: str) -> str | None:
        """Content of a file."""

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none where there is no folder."""

    def size(self, path: str) -> int | None:
        """Bytes of a file; None for anything else."""

    def room(self, path: str) -> tuple[int, int] | None:
        """Bytes of a file system: all, and free."""

    def run(self, *command: str) -> Output | None:
        """Run a tool; None where it is not installed."""

    def taken(self, address: str, port: int) -> str | None:
        """Why a server could not listen there; None where it could."""


class Machine:
    """This machine."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.environment: Mapping[str, str] = dict(os.environ if environment is None else environment)

    def text(self, path: str) -> str | None:
        """As Host."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """As Host."""
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    def size(self, path: str) -> int | None:
        """As Host."""
        with contextlib.suppress(OSError):
            if Path(path).is_file():
                return Path(path).stat().st_size
        return None

    def room(self, path: str) -> tuple[int, int] | None:
        """As Host."""
        try:
            found = os.statvfs(path)
        except OSError:
            return None
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def run(self, *command: str) -> Output | None:
        """As Host."""
        known = TOOLS.get(command[0])
        tool = shutil.which(command[0]) or (known if known and os.access(known, os.X_OK) else None)
        if tool is None:
            return None
        limit = PING_TIMEOUT_S if any(word.endswith("ping") for word in command) else TOOL_TIMEOUT_S
        with tempfile.TemporaryFile() as said:
            try:
                process = subprocess.Popen(
                    [tool, *command[1:]], stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
                )
            except OSError:
                return None
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                process.kill()  # and not waited for: a tool of a sick driver may never end
                return Output("", None)
            said.seek(0)
            return Output(said.read(LONGEST).decode("utf-8", "replace"), status)

    def taken(self, address: str, port: int) -> str | None:
        """As Host."""
        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
        except (OSError, OverflowError) as error:
            return str(error)
        return None
