"""What a rerun takes over from the journal, and what it does again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from vllm_ascend_dsv41.quant import CheckpointError, journal
from vllm_ascend_dsv41.quant.partial import partial_path

from .interrupted import convert_module, digests, ran, run


def test_only_the_rest_is_done(half, monkeypatch, uninterrupted):
    assert min(ran(monkeypatch, *half)) == 40
    assert digests(half[1]) == uninterrupted


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


@pytest.mark.parametrize(
    "tail",
    [
        b'{"done": 4',
        b"\x00\x00\x00",
        b"[]\n",
        b"",
        b'{"done": "abc"}\n{"done": [1]}\n{"done": 99999}\n{"done": true}\n',
        b'{"synced": []}\n{"undone": 5}\n{"undone": [[]]}\n',
        b"[" * 100_000,
    ],
)
def test_a_torn_journal(half, monkeypatch, uninterrupted, tail):
    source, target = half
    with (partial_path(target) / "journal").open("ab") as file:
        file.write(tail)
    assert min(ran(monkeypatch, source, target)) == 40
    assert digests(target) == uninterrupted


def test_pages_that_the_disk_lost(official, uninterrupted, tmp_path, monkeypatch):
    """The system reports a failed write-back once; afterwards the pages are gone, and everything looks clean."""
    right, failed = convert_module.sync, []

    def lose(path: Path) -> None:
        if "00002-of" in path.name and not failed:
            failed.append(path)
            size = path.stat().st_size
            os.truncate(path, 200_000)
            os.truncate(path, size)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        right(path)

    monkeypatch.setattr(convert_module, "sync", lose)
    with pytest.raises(CheckpointError, match=r"00002-of-.* cannot be written to the disk \(Input/output error\), "):
        run(official("a"), tmp_path / "out", workers=1)
    run(official("a"), tmp_path / "out", workers=1)
    assert digests(tmp_path / "out") == uninterrupted


def test_what_was_written_before_is_forced_to_the_disk_too(half, monkeypatch, uninterrupted):
    source, target = half
    path = partial_path(target) / "journal"
    lines = [line for line in path.read_text().splitlines() if '"synced"' not in line]
    path.write_text("\n".join(lines) + "\n")
    forced, right = set(), convert_module.sync

    def note(path: Path) -> None:
        forced.add(path.name)
        right(path)

    monkeypatch.setattr(convert_module, "sync", note)
    run(source, target)
    assert {path.name for path in target.rglob("*") if path.is_file()} <= forced
    assert digests(target) == uninterrupted


def test_what_does_not_belong_there_is_not_published(half, uninterrupted):
    source, target = half
    (partial_path(target) / "checkpoint" / "stray.safetensors").write_bytes(b"stray")
    run(source, target)
    assert digests(target) == uninterrupted
