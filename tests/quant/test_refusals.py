"""What a conversion refuses or gives up: one clear error, and nothing under the final name."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_dsv41.quant import CheckpointError, Weights, convert, open_checkpoint, work
from vllm_ascend_dsv41.quant.partial import partial_path

from .interrupted import STEP, Stop, convert_module, digests, done_steps, run


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


def test_a_side_file_that_leads_nowhere(official, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(official("a"), source)
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to("blobs/0123")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: leads nowhere \(blobs/0123\); download it again"):
        run(source, tmp_path / "out")
    (source / "tokenizer.json").unlink()
    (source / "optional").write_text("")
    with pytest.raises(CheckpointError, match="optional: has the name of a folder that the conversion makes; move it"):
        run(source, tmp_path / "out")


def test_a_side_file_that_vanishes_meanwhile(official, tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(official("a"), source)
    right = work.Worker.run

    def vanish(self, step, locations) -> None:
        (source / "tokenizer_config.json").unlink(missing_ok=True)
        right(self, step, locations)

    monkeypatch.setattr(work.Worker, "run", vanish)
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: No such file or directory; put that right, "):
        run(source, tmp_path / "out", workers=1)


@pytest.mark.parametrize("target", [".", "/", "", "sub/.."])
def test_targets_that_are_directories_already(official, tmp_path, monkeypatch, target):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="exists already"):
        run(official("a"), Path(target))


def test_a_name_that_is_too_long(official, tmp_path):
    with pytest.raises(CheckpointError, match="File name too long"):
        run(official("a"), tmp_path / ("x" * 250))


def test_a_script_without_main_guard(official, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom vllm_ascend_dsv41.quant import Weights, convert\n"
        "convert(sys.argv[1], sys.argv[2], Weights.W8A8, workers=2, step_bytes=100_000)\n"
    )
    command = [sys.executable, str(script), str(official("a")), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "a worker process was killed (does the script have a main guard?)" in done.stderr


def test_a_config_that_the_format_cannot_express(official, tmp_path):
    from vllm_ascend_dsv41.quant import inventory, read_config
    from vllm_ascend_dsv41.quant.checkpoint import ConfigError

    config = read_config(official("a"))
    for name in ("hidden_size", "moe_intermediate_size", "engram_head_dim"):
        text = {**config["text_config"], name: 48}
        with pytest.raises(ConfigError, match=rf"{name} = 48, expected a multiple of 32"):
            inventory({**config, "text_config": text})


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


def test_a_source_that_is_replaced_meanwhile(official, tmp_path, monkeypatch, uninterrupted):
    source, target = tmp_path / "source", tmp_path / "out"
    shutil.copytree(official("a"), source)
    right = work.Worker.run

    def replace(self, step, locations) -> None:
        if step.number == 30:
            shutil.copy(source / "model-00002-of-00016.safetensors", tmp_path / "new")
            (tmp_path / "new").rename(source / "model-00002-of-00016.safetensors")
        right(self, step, locations)

    monkeypatch.setattr(work.Worker, "run", replace)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00016.safetensors: was changed while it was converted"):
        run(source, target, workers=1)
    monkeypatch.setattr(work.Worker, "run", right)
    run(source, target)
    assert digests(target) == uninterrupted


def test_without_standard_error(monkeypatch):
    from vllm_ascend_dsv41.quant.progress import Silent, on_terminal

    monkeypatch.setattr(sys, "stderr", None)
    assert isinstance(on_terminal(), Silent)


def test_output_that_nobody_reads(official, tmp_path):
    """The conversion is worth more than its messages."""
    command = [
        sys.executable,
        "-m",
        "vllm_ascend_dsv41.cli",
        "quantize",
        str(official("a")),
        str(tmp_path / "out"),
        "--json",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait() == 0, error
    assert error == b""
    open_checkpoint(tmp_path / "out")


def test_events_of_a_conversion_that_is_given_up(official, tmp_path, monkeypatch, capsys):
    from vllm_ascend_dsv41.quant.progress import Events

    path = official("a")
    capsys.readouterr()
    monkeypatch.setattr(work.Worker, "run", lambda *_: (_ for _ in ()).throw(Stop()))
    with pytest.raises(Stop):
        run(path, tmp_path / "out", workers=1, progress=Events())
    events = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert events == ["begin", "stopped"]
