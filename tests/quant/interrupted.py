"""Conversions that are interrupted: how they are started, and what is looked at."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from pathlib import Path

from vllm_ascend_dsv41.quant import Weights, convert, work
from vllm_ascend_dsv41.quant.partial import partial_path

convert_module = sys.modules["vllm_ascend_dsv41.quant.convert"]
STEP = 100_000  # bytes: some 200 steps
CHILD = """
import os, signal, sys, time
from vllm_ascend_dsv41.quant import Weights, convert
import vllm_ascend_dsv41.quant.convert
module = sys.modules["vllm_ascend_dsv41.quant.convert"]
source, target, workers, where = sys.argv[1:]

def die_at(name, before):
    right = getattr(module, name)
    def function(*arguments, **options):
        if before:
            os.kill(os.getpid(), signal.SIGKILL)
        right(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(module, name, function)

def slowly(*arguments):  # so that there is time to interrupt it
    for step in run_steps(*arguments):
        yield step
        time.sleep(0.005)

run_steps, module.run_steps = module.run_steps, slowly
if __name__ == "__main__":
    if where == "rmtree":
        right = module.remove.__globals__["shutil"].rmtree
        def rmtree(path, ignore_errors=False):
            if not ignore_errors:
                os.kill(os.getpid(), signal.SIGKILL)
            right(path, ignore_errors)
        module.remove.__globals__["shutil"].rmtree = rmtree
    elif where:
        name, _, when = where.partition(":")
        die_at(name, when == "before")
    convert(source, target, Weights.W8A8, 2_000_000, workers=int(workers), step_bytes=100_000)
"""


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def run(source: Path, target: Path, **options) -> Path:
    return convert(source, target, Weights.W8A8, 2_000_000, step_bytes=STEP, **options)


def done_steps(target: Path) -> int:
    path = partial_path(target) / "journal"
    return path.read_text().count('"done"') if path.exists() else 0


def wait_for(target: Path, steps: int, process: subprocess.Popen[str]) -> None:
    while done_steps(target) < steps and process.poll() is None:
        time.sleep(0.002)


class Stop(Exception):
    """Raised in the middle of a conversion."""


def ran(monkeypatch, source: Path, target: Path) -> list[int]:
    """Finish, and say which steps that took."""
    steps, right = [], work.Worker.run

    def note(self, step, locations) -> None:
        steps.append(step.number)
        right(self, step, locations)

    monkeypatch.setattr(work.Worker, "run", note)
    run(source, target, workers=1)
    return steps
