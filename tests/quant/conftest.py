"""Conversions to interrupt."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_dsv41.quant import work

from .interrupted import CHILD, Stop, digests, done_steps, run

COMMAND = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started us in the background had it ignored
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.quant import work
right = work.Worker._piece
def slow(*arguments):
    print("writing", flush=True)
    time.sleep(1 if "nohup" in sys.argv else 60)
    work.Worker._piece = right
    right(*arguments)
work.Worker._piece = slow
sys.exit(main(["quantize", sys.argv[1], sys.argv[2], "--workers", "1"]))
"""


@pytest.fixture(scope="module")
def uninterrupted(official, tmp_path_factory):
    target = run(official("a"), tmp_path_factory.mktemp("whole") / "out", workers=1)
    return digests(target)


@pytest.fixture
def child(official, tmp_path):
    """Starts a conversion in a process of its own."""
    script = tmp_path.parent / "child.py"
    script.write_text(CHILD)
    started = []

    def start(target: Path, workers: int = 2, where: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(official("a")), str(target), str(workers), where]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def half(official, tmp_path, monkeypatch):
    """A conversion that was stopped after 40 steps; returns (source, target)."""
    source, target = tmp_path / "source", tmp_path / "out"
    shutil.copytree(official("a"), source)
    right = work.Worker.run

    def stop(self, step, locations) -> None:
        if step.number == 40:
            raise Stop
        right(self, step, locations)

    monkeypatch.setattr(work.Worker, "run", stop)
    with pytest.raises(Stop):
        run(source, target, workers=1)
    monkeypatch.setattr(work.Worker, "run", right)
    assert done_steps(target) == 40
    return source, target


@pytest.fixture
def command(official):
    """A conversion by the command line that waits in its first step."""
    started = []

    def start(target: Path, *options: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", COMMAND, str(official("a")), str(target), *options]
        started.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "writing\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
