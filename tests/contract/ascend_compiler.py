"""Triton-Ascend's front end and the open part of its compiler, kept in a cache folder beside the environment.

python tests/contract/ascend_compiler.py    # sets it up; says why where it cannot

Kernels are lowered to linalg and through all passes of bishengir-compile, which plan on-chip memory and place
synchronisation. CANN's hivmc, which then makes the binary, is not public: its input is where this ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OPTIONS = [
    "--enable-auto-multi-buffer=true",
    "--enable-hfusion-compile=true",
    "--enable-triton-kernel-compile=true",
    "--enable-hivm-compile=true",
]
#: Stands for hivmc: says that it is there, and keeps the module that it is given.
HIVMC = """#!/bin/sh
for argument in "$@"; do [ "$argument" = --version ] && echo "none" && exit 0; done
cp "$1" "$KEPT"
"""


class CompilerError(RuntimeError):
    """The compiler cannot be had on this machine; the text says why."""


def cache() -> Path:
    """Where it lies."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm-ascend-dsv41" / "ascend-compiler"
    return Path(os.environ.get("ASCEND_COMPILER", default))


def prepare() -> Path:
    """Folder of the installed packages (215 MB of downloads, once). Raises CompilerError."""
    if platform.machine() != "x86_64" or sys.version_info[:2] != (3, 11):
        raise CompilerError(f"the pinned wheels are for Python 3.11 on x86_64, this is {platform.python_version()}")
    cache().mkdir(parents=True, exist_ok=True)
    target, partial = cache() / "site", cache() / "partial"
    with open(cache() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--require-hashes"]
            command = [*map(str, pip), "--target", str(partial), "-r", str(HERE / "requirements.txt")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode:
                raise CompilerError(f"installing {HERE / 'requirements.txt'}: {done.stderr.strip()[-500:]}")
            partial.rename(target)
    return target


def lower(source: Path, kernel: str, signature: dict[str, str], constants: dict[str, Any], soc: str, out: Path) -> str:
    """Triton kernel -> linalg, as Triton-Ascend hands it to its compiler. Raises RuntimeError with its complaint."""
    job = {"source": str(source), "kernel": kernel, "signature": signature, "constants": constants, "soc": soc}
    variables = {**os.environ, "PYTHONPATH": str(prepare()), "TRITON_CACHE_DIR": str(out / "cache")}
    variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [sys.executable, str(HERE / "lower.py"), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return done.stdout


def compile_linalg(linalg: str, soc: str, out: Path) -> str:
    """linalg -> the module that hivmc would be given. Raises RuntimeError with the compiler's complaint."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "kernel.mlir").write_text(linalg)
    hivmc = out / "hivmc"
    hivmc.write_text(HIVMC)
    hivmc.chmod(0o755)
    package = prepare() / "ascendnpuir"
    variables = {**os.environ, "PATH": f"{out}:{os.environ['PATH']}", "KEPT": str(out / "kept.mlir")}
    variables["LD_LIBRARY_PATH"] = str(package / "lib")
    command = [str(package / "bin/bishengir-compile"), str(out / "kernel.mlir"), f"--target={soc}", *OPTIONS]
    command += ["-o", str(out / "kernel.o")]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return (out / "kept.mlir").read_text()


if __name__ == "__main__":
    try:
        print(f"ready: {prepare()}")
    except CompilerError as error:
        sys.exit(f"error: {error}")
