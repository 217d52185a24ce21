"""Two hosts on one machine: network namespaces with an Ethernet pair between them. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

NIC = "eth0"
BIN = Path(sys.executable).parent


def why_not() -> str:
    """Why this machine cannot have them; empty where it can."""
    if shutil.which("ip") is None:
        return "the tool ip is not installed (iproute2)"
    if os.geteuid():
        return "network namespaces need root"
    name = f"dsv41-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.stderr.strip()


class Host:
    """One of them."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.address, self.folder = number, f"10.77.0.{number + 1}", folder
        self.name = f"dsv41-{os.getpid()}-{number}"
        self._started = 0

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    def start(self, *words: str, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
        """A process on this host, and its log."""
        self._started += 1
        log = self.folder / f"host{self.number}.{self._started}.log"
        variables = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **environment}
        for name in ("VLLM_PLUGINS", "VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING"):
            variables.pop(name, None)  # of the tests
        with log.open("wb") as output:
            process = subprocess.Popen(
                self.command(*words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )
        return process, log

    def python(self, text: str, timeout: float = 60) -> str:
        """What a small program on this host prints."""
        done = subprocess.run(
            self.command(sys.executable, "-c", text), capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self) -> None:
        """As if its power was cut, but that the kernel still closes connections."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.1)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Both, connected; whatever runs on them ends with them."""
    hosts = Host(0, folder), Host(1, folder)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for host in hosts:
            ip("netns", "add", host.name)
        ip("link", "add", NIC, "netns", hosts[0].name, "type", "veth", "peer", "name", NIC, "netns", hosts[1].name)
        for host in hosts:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", NIC)
            ip("-n", host.name, "link", "set", "lo", "up")
            ip("-n", host.name, "link", "set", NIC, "up")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
