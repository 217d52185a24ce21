"""Killed at any moment, a conversion goes on, and the directory comes out byte for byte the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from vllm_ascend_dsv41.quant import CheckpointError, open_checkpoint, work
from vllm_ascend_dsv41.quant.partial import partial_path

from .interrupted import digests, done_steps, run, wait_for


def interrupted_at(steps: int, delay: float, child, official: Path, target: Path, workers: int) -> None:
    """Kill after this many steps and a moment, then finish."""
    process = child(target, workers)
    wait_for(target, steps, process)
    time.sleep(delay)
    process.kill()
    process.wait()
    if target.exists():  # it was faster
        shutil.rmtree(target)
        interrupted_at(steps // 2, delay, child, official, target, workers)
        return
    assert done_steps(target) >= steps
    run(official, target, workers=workers)


def check_killed_at_random(seed: int, count: int, child, official, uninterrupted, tmp_path) -> None:
    chance = random.Random(seed)
    for number in range(count):
        target = tmp_path / str(number)
        steps = chance.randrange(1, 190)
        interrupted_at(steps, chance.random() * 0.01, child, official("a"), target, 1 + number % 2)
        assert digests(target) == uninterrupted
        assert not partial_path(target).exists()
        shutil.rmtree(target)


def test_killed_at_random_points(child, official, uninterrupted, tmp_path):
    check_killed_at_random(0, 4, child, official, uninterrupted, tmp_path)


@pytest.mark.long
def test_killed_at_twenty_random_points(child, official, uninterrupted, tmp_path):
    check_killed_at_random(1, 20, child, official, uninterrupted, tmp_path)


def test_killed_again_and_again(child, official, uninterrupted, tmp_path):
    """Progress is kept over several deaths."""
    target = tmp_path / "out"
    for steps in (30, 90, 150):
        process = child(target)
        wait_for(target, steps, process)
        process.kill()
        process.wait()
        assert done_steps(target) >= steps
    run(official("a"), target)
    assert digests(target) == uninterrupted


@pytest.mark.parametrize(
    "where",
    [
        "_make_files:before",
        "_make_files:after",
        "write_small_files:before",
        "publish:before",
        "publish:after",
        "remove:before",
    ],
)
def test_killed_between_two_acts(child, official, uninterrupted, tmp_path, where):
    target = tmp_path / "out"
    process = child(target, 1, where)
    assert process.wait() == -signal.SIGKILL
    assert target.exists() == (where in ("publish:after", "remove:before"))  # complete, or not there
    if target.exists():
        assert digests(target) == uninterrupted
    assert run(official("a"), target) == target
    assert digests(target) == uninterrupted
    assert not partial_path(target).exists()


def test_a_killed_worker(child, tmp_path, official, uninterrupted):
    target = tmp_path / "out"
    process = child(target, 2)
    wait_for(target, 20, process)
    workers = [
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/stat")
        if f" {process.pid} " in path.read_text().rpartition(")")[2][:20]
        and b"spawn_main" in (path.parent / "cmdline").read_bytes()
    ]
    os.kill(workers[0], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert (
        "a worker process was killed (out of memory? then use fewer --workers), then run the same command again"
        in output
    )
    run(official("a"), target)
    assert digests(target) == uninterrupted


def test_workers_end_with_their_parent(child, tmp_path):
    process = child(tmp_path / "out", 2)
    wait_for(tmp_path / "out", 5, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while any(alive(int(pid)) for pid in children):
        assert time.monotonic() < deadline, "workers outlive a killed conversion"
        time.sleep(0.05)


def test_killed_while_clearing_away(child, official, uninterrupted, tmp_path):
    target = tmp_path / "out"
    assert child(target, 1, "rmtree").wait() == -signal.SIGKILL
    assert digests(target) == uninterrupted
    with pytest.raises(CheckpointError, match="exists already; if it is no finished conversion, remove it"):
        run(official("a"), target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_is_made_again_is_not_done(child, official, uninterrupted, tmp_path):
    """Killed, a file lost, killed again when it had been made anew: the journal must not say that it is filled."""
    target = tmp_path / "out"
    process = child(target, 1)
    wait_for(target, 60, process)
    process.kill()
    process.wait()
    [file] = (partial_path(target) / "checkpoint").glob("quant_model_weights-00002-of-*")
    file.unlink()
    assert child(target, 1, "_make_files:after").wait() == -signal.SIGKILL
    run(official("a"), target)
    assert digests(target) == uninterrupted


def test_a_finished_directory_that_was_moved_away(child, official, uninterrupted, tmp_path):
    target = tmp_path / "out"
    assert child(target, 1, "publish:after").wait() == -signal.SIGKILL
    target.rename(tmp_path / "moved")
    assert child(target, 1, "_make_files:after").wait() == -signal.SIGKILL
    run(official("a"), target)
    assert digests(target) == uninterrupted


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_stopped_in_its_first_step_leaves_nothing(command, tmp_path, signum):
    process = command(tmp_path / "out")
    process.send_signal(signum)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error == "dsv41: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_nohup_is_respected(command, tmp_path):
    process = command(tmp_path / "out", "nohup")
    process.send_signal(signal.SIGHUP)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    open_checkpoint(tmp_path / "out")


def test_an_interrupted_command_says_how_to_go_on(official, tmp_path, capsys, monkeypatch):
    from vllm_ascend_dsv41.cli import main

    right = work.Worker.run

    def stop(self, step, locations) -> None:
        if step.number == 3:
            raise KeyboardInterrupt
        right(self, step, locations)

    arguments = ["quantize", str(official("a")), str(tmp_path / "out"), "--shard-size", "2MiB", "--workers", "1"]
    monkeypatch.setattr(work.Worker, "run", stop)
    assert main(arguments) == 130
    error = capsys.readouterr().err
    assert (
        error
        == f"dsv41: {tmp_path}/.out.dsv41-partial keeps what is done: the same command goes on\ndsv41: interrupted\n"
    )
    monkeypatch.setattr(work.Worker, "run", right)
    assert main(arguments) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
