"""A server process that is always stopped again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

START_TIMEOUT_S = 600.0
GRACE_S = (10.0, 15.0)  # after the first and the second SIGTERM: vLLM loses one that comes while it starts


class ServerError(OSError):
    """The server ended or did not answer; the message holds the end of its log."""


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    """Whether somebody listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Server:
    """``dsv41 serve MODEL ...`` on 127.0.0.1, its output in ``log``. Use as a context manager."""

    def __init__(
        self, model: Path, options: Sequence[str], log: Path, port: int = 0, env: dict[str, str] | None = None
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._command = [
            *(sys.executable, "-m", "vllm_ascend_dsv41.cli", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), *options),
        ]
        self._env = {**os.environ, **(env or {})}

    def __enter__(self) -> Server:
        if _answers(self.port):  # else its answers would be taken for ours
            raise ServerError(f"port {self.port} on 127.0.0.1 is in use; name another one")
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=self._env, start_new_session=True
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the server, which also leads its process group."""
        return self._process.pid

    def tail(self, lines: int = 30) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def _wait_until_healthy(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with status {self._process.returncode}:\n{self.tail()}")
            if self._healthy() and self._process.poll() is None:
                return
            time.sleep(0.25)
        raise ServerError(f"the server was not ready after {START_TIMEOUT_S:.0f} s:\n{self.tail()}")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def stop(self) -> int:
        """Ask twice, then end the whole process group. Returns the exit status."""
        for grace in GRACE_S:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError):  # workers outlive a parent that was killed
            os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()
