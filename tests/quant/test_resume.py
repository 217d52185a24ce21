"""However a conversion is stopped: the same command goes on, and the directory comes out byte for byte the same."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_ascend_dsv41.quant import CheckpointError, Weights, convert, journal, open_checkpoint, work
from vllm_ascend_dsv41.quant.partial import partial_path

convert_module = sys.modules["vllm_ascend_dsv41.quant.convert"]
STEP = 100_000  # bytes: some 200 steps
CHILD = """
import os, signal, sys
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

if __name__ == "__main__":
    if where:
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


def done_steps(target: Path) -> int:
    path = partial_path(target) / "journal"
    return path.read_text().count('"done"') if path.exists() else 0


def wait_for(target: Path, steps: int, process: subprocess.Popen[str]) -> None:
    while done_steps(target) < steps and process.poll() is None:
        time.sleep(0.002)


def interrupted_at(steps: int, delay: float, child, official: Path, target: Path, workers: int) -> int:
    """Kill after this many steps and a moment, then finish. Returns the steps that were not done again."""
    process = child(target, workers)
    wait_for(target, steps, process)
    time.sleep(delay)
    process.kill()
    process.wait()
    assert not target.exists()
    kept = done_steps(target)
    run(official, target, workers=workers)
    return kept


def check_killed_at_random(seed: int, count: int, child, official, uninterrupted, tmp_path) -> None:
    chance = random.Random(seed)
    for number in range(count):
        target = tmp_path / str(number)
        steps = chance.randrange(1, 190)
        kept = interrupted_at(steps, chance.random() * 0.01, child, official("a"), target, 1 + number % 2)
        assert kept >= steps
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
        "a worker process was killed (out of memory?); use fewer --workers, then run the same command again" in output
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


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_full_disk(official, uninterrupted, tmp_path, monkeypatch):
    right, written = os.pwrite, []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        written.append(len(data))
        if len(written) > 300:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return right(descriptor, data[: len(data) // 2 + 1], offset)  # as it may be: a part at a time

    monkeypatch.setattr(work.os, "pwrite", full)
    with pytest.raises(
        CheckpointError, match=r"cannot be written \(No space left on device\); make room, then run the same"
    ):
        run(official("a"), tmp_path / "out", workers=1)
    assert [path.name for path in tmp_path.iterdir()] == [".out.dsv41-partial"]
    monkeypatch.undo()
    run(official("a"), tmp_path / "out")
    assert digests(tmp_path / "out") == uninterrupted


def test_a_source_that_is_cut_meanwhile(official, tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(official("a"), source)
    right = work.Worker.run

    def cut(self, step, locations) -> None:
        if step.number == 30:
            for file in source.glob("model-0000[3-9]*"):
                os.truncate(file, 10_000)
        right(self, step, locations)

    monkeypatch.setattr(work.Worker, "run", cut)
    with pytest.raises(
        CheckpointError, match=r"model-.*: ends before byte [0-9]+, it was cut meanwhile; download it again"
    ):
        run(source, tmp_path / "out", workers=1)


def test_an_unreadable_source(official, tmp_path, monkeypatch):
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(work.os, "preadv", broken)
    with pytest.raises(
        CheckpointError, match=r"model-.*safetensors: cannot be read at byte \d+ \(Input/output error\)"
    ):
        run(official("a"), tmp_path / "out", workers=1)
    assert list(tmp_path.iterdir()) == []


class Stop(Exception):
    """Raised in the middle of a conversion."""


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


def ran(monkeypatch, source: Path, target: Path) -> list[int]:
    """Finish, and say which steps that took."""
    steps, right = [], work.Worker.run

    def note(self, step, locations) -> None:
        steps.append(step.number)
        right(self, step, locations)

    monkeypatch.setattr(work.Worker, "run", note)
    run(source, target, workers=1)
    return steps


def test_only_the_rest_is_done(half, monkeypatch, uninterrupted):
    assert min(ran(monkeypatch, *half)) == 40
    assert digests(half[1]) == uninterrupted


def test_another_command_is_refused(half):
    source, target = half
    with pytest.raises(
        CheckpointError, match=r"interrupted conversion with another --weights w8a8 \(now bf16\), --shard-size"
    ):
        convert(source, target, Weights.BF16, step_bytes=STEP)
    with pytest.raises(
        CheckpointError, match=r"with another --rotate none \(now quarot\); run that command again to finish"
    ):
        run(source, target, rotate=True)
    assert done_steps(target) == 40


def test_steps_of_a_file_that_was_downloaded_again_are_done_again(half, monkeypatch, uninterrupted):
    source, target = half
    os.utime(source / "model-00002-of-00016.safetensors", ns=(1, 1))  # holds the embedding
    steps = ran(monkeypatch, source, target)
    again = [number for number in steps if number < 40]
    assert again
    assert len(again) < 40
    assert digests(target) == uninterrupted


def test_after_a_crash_of_the_machine_only_what_is_on_the_disk_counts(half, monkeypatch, uninterrupted):
    """Pages of a step that was done may not have reached the disk: they are zeros now."""
    source, target = half
    contents = partial_path(target) / "checkpoint"
    lines = [json.loads(line) for line in (partial_path(target) / "journal").read_text().splitlines()]
    synced = {line["synced"] for line in lines if "synced" in line}
    assert synced  # the first files are complete
    for path in contents.glob("*.safetensors"):
        if path.name not in synced:
            size = path.stat().st_size
            begin = path.read_bytes()[:1000]
            os.truncate(path, 1000)
            os.truncate(path, size)
            assert path.read_bytes()[:1000] == begin
    monkeypatch.setattr(journal, "boot_id", lambda: "another boot")
    steps = ran(monkeypatch, source, target)
    assert 0 < min(steps) < 40
    assert digests(target) == uninterrupted


def test_a_lost_file_is_made_again(half, monkeypatch, uninterrupted):
    source, target = half
    [file] = (partial_path(target) / "checkpoint").glob("quant_model_weights-00002-of-*")
    file.unlink()
    assert 0 < len([number for number in ran(monkeypatch, source, target) if number < 40]) < 40
    assert digests(target) == uninterrupted


@pytest.mark.parametrize("tail", [b'{"done": 4', b"\x00\x00\x00", b"[]\n", b""])
def test_a_torn_journal(half, monkeypatch, uninterrupted, tail):
    source, target = half
    with (partial_path(target) / "journal").open("ab") as file:
        file.write(tail)
    assert min(ran(monkeypatch, source, target)) == 40
    assert digests(target) == uninterrupted


def test_a_journal_of_another_version(half):
    source, target = half
    (partial_path(target) / "journal").write_text('{"format": 0}\n')
    with pytest.raises(CheckpointError, match=r"was written by another version; remove .*partial to start anew"):
        run(source, target)


def test_a_foreign_directory_of_that_name_is_kept(official, tmp_path):
    foreign = tmp_path / ".out.dsv41-partial"
    foreign.mkdir()
    (foreign / "precious").write_text("data")
    with pytest.raises(CheckpointError, match="is no remainder of a conversion; move it away"):
        run(official("a"), tmp_path / "out")
    assert (foreign / "precious").read_text() == "data"


def test_a_target_made_meanwhile_is_kept(official, tmp_path, monkeypatch):
    right = convert_module.write_small_files

    def made(*arguments: object) -> list[Path]:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
        return right(*arguments)

    monkeypatch.setattr(convert_module, "write_small_files", made)
    with pytest.raises(CheckpointError, match="was made by somebody else meanwhile"):
        run(official("a"), tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["theirs"]


def test_dangling_link_as_target(official, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="exists already"):
        run(official("a"), tmp_path / "out")


def test_existing_target_is_kept(official, tmp_path):
    target = tmp_path / "there"
    target.mkdir()
    (target / "precious").write_text("data")
    with pytest.raises(CheckpointError, match="exists already"):
        run(official("a"), target)
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "precious"]


def test_too_little_room_is_refused_before_writing(official, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="0 MiB free, the conversion needs"):
        run(official("a"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


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


def test_two_at_once(command, official, tmp_path):
    target = tmp_path / "out"
    process = command(target)
    with pytest.raises(CheckpointError, match="another conversion is writing it"):
        convert(official("a"), target, Weights.W8A8)
    assert partial_path(target).is_dir()  # the refused one did not touch it
    process.kill()
    process.wait()
    convert(official("a"), target, Weights.W8A8)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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
