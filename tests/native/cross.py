"""An aarch64 compiler and an emulated aarch64 processor, kept in a cache folder: hosts of Ascend NPUs are aarch64.

python tests/native/cross.py    # sets both up; says why where it cannot
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ["-O3", "-ffp-contract=off", "-fno-trapping-math", "-static"]  # as pyproject.toml has them


class ToolError(RuntimeError):
    """A tool cannot be had on this machine; the text says which, and why."""


def cache() -> Path:
    """Where the tools lie."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-ascend-dsv41" / "aarch64"
    return Path(os.environ.get("AARCH64_TOOLS", default))


def _run(*command: str | Path, cwd: Path | None = None) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise ToolError(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout).strip()[-500:]}")


def compiler() -> Path:
    """Folder for PYTHONPATH from which ``python -m ziglang cc`` runs."""
    target = cache() / "zig"
    if not (target / "ziglang").is_dir():
        partial = cache() / "zig.partial"
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        _run(*pip, "--target", partial, "-r", HERE / "requirements.txt")
        partial.rename(target)
    return target


def emulator() -> Path:
    """A program that runs aarch64 programs: the machine's own qemu, or Debian's, unpacked."""
    for name in ("qemu-aarch64-static", "qemu-aarch64"):
        if found := shutil.which(name):
            return Path(found)
    target = cache() / "qemu-aarch64-static"
    if not target.is_file():
        for tool in ("apt-get", "dpkg"):
            if shutil.which(tool) is None:
                raise ToolError(f"neither qemu-aarch64 nor {tool} is there; install qemu-user-static")
        partial = cache() / "qemu.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _run("apt-get", "download", "qemu-user-static", cwd=partial)
        [package] = partial.glob("*.deb")
        _run("dpkg", "--extract", package, partial)
        (partial / "usr/bin/qemu-aarch64-static").rename(target)
        shutil.rmtree(partial)
    return target


def build(target: str, program: Path) -> None:
    """Compile run_kernels.c for ``target``, for example aarch64-linux-musl."""
    variables = {**os.environ, "PYTHONPATH": str(compiler()), "ZIG_GLOBAL_CACHE_DIR": str(cache() / "objects")}
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target, *FLAGS]
    command = [*zig, "-o", program, HERE / "run_kernels.c", "-lm"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{target}: {done.stderr}")


def prepare() -> Path:
    """Set both tools up, one process at a time; returns the emulator. Raises ToolError."""
    if platform.machine() != "x86_64":
        raise ToolError(f"this machine is {platform.machine()}: the other tests have run natively")
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        compiler()
        return emulator()


if __name__ == "__main__":
    try:
        print(f"ready: {prepare()}")
    except ToolError as error:
        sys.exit(f"error: {error}")
