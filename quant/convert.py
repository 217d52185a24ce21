"""From the official checkpoint to the Ascend layout: resumable, in several processes, in bounded memory."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import native
from . import rotation
from .checkpoint import OFFICIAL_INDEX, Checkpoint, CheckpointError, Layout, Location, open_checkpoint
from .describe import side_files, small_bytes, write_small_files
from .inventory import Weights
from .journal import Journal
from .partial import CONTENTS, JOURNAL, clear, partial_directory, partial_path, publish, remove, sync
from .plan import DEFAULT_SHARD_BYTES, STEP_BYTES, Plan, Step, make_plan
from .pool import Job, run_steps
from .progress import Progress, on_terminal
from .work import AGAIN

log = logging.getLogger(__name__)


def convert(
    source: str | Path,
    target: str | Path,
    weights: Weights,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    rotate: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
    step_bytes: int = STEP_BYTES,
) -> Path:
    """Convert an official checkpoint. Returns the new directory.

    ``shard_bytes``: largest weight file; ``rotate``: QuaRot (``rotation``); ``workers``: processes, one per usable core
    if not given; ``step_bytes``: output between two entries of the journal.

    Everything is written to a hidden directory beside the target and renamed at the end. However it was stopped, the
    same call goes on from there, and the result is the same. Raises CheckpointError: before data is read for a bad
    source, an existing target, too little room, an unreadable side file, an interrupted conversion with other options
    or a second conversion to the same target; later for damaged data, a full disk or a killed worker. ConfigError for
    ``rotate`` where the hidden size does not allow it. Processes are spawned: a script that calls this needs the
    usual ``if __name__ == "__main__"``.
    """
    target = Path(os.path.abspath(target))
    try:
        clear(target)
        if not target.name or not partial_path(target).exists():
            _refuse_existing(target)
        checkpoint = open_source(source)
        if rotate:
            rotation.check(checkpoint.config)
        plan = make_plan(checkpoint.config, weights, shard_bytes, rotate, step_bytes)
        if not target.parent.is_dir():
            raise CheckpointError(f"{target.parent}: no such directory; create it first")
        conversion = _Conversion(checkpoint, plan, weights, rotate, side_files(checkpoint.directory))
        identity = _identity(conversion, shard_bytes, step_bytes)
        with partial_directory(target) as partial:
            conversion.run(partial, target, identity, workers, progress or on_terminal())
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or target}: {error.strerror or error}; put that right, {AGAIN}"
        ) from error
    return target


def open_source(source: str | Path) -> Checkpoint:
    """The official checkpoint, completely checked. Raises CheckpointError."""
    checkpoint = open_checkpoint(source)
    if checkpoint.layout is not Layout.OFFICIAL:
        raise CheckpointError(f"{checkpoint.directory}: is already in the Ascend layout; give the official checkpoint")
    return checkpoint


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target}: exists already; if it is no finished conversion, remove it or name another")


@dataclass(frozen=True)
class _Conversion:
    """What is converted, and how."""

    checkpoint: Checkpoint
    plan: Plan
    weights: Weights
    rotate: bool
    copied: list[Path]

    def run(
        self, partial: Path, target: Path, identity: Mapping[str, Any], workers: int | None, progress: Progress
    ) -> None:
        """In the locked directory ``partial``."""
        before = _fingerprints(self.checkpoint)
        steps = self.plan.steps
        reads = {step.number: {at.file for at in _locations(step, self.checkpoint).values()} for step in steps}
        journal = Journal(partial / JOURNAL, identity, before, reads, self.plan)
        contents = partial / CONTENTS
        try:
            if journal.finished and target.is_dir() and not contents.exists():
                remove(partial)  # killed between the last two acts below
                return
            _refuse_existing(target)
            _check_room(partial, self.plan, small_bytes(self.copied, self.checkpoint.config, self.plan))
            _write_weights(self.checkpoint, self.plan, contents, self.weights, journal, workers, progress)
            self._write_rest(contents)
            changed = [file for file, mark in _fingerprints(self.checkpoint).items() if before[file] != mark]
            if changed:
                path = self.checkpoint.directory / changed[0]
                raise CheckpointError(f"{path}: was changed while it was converted; leave it alone, {AGAIN}")
            journal.finish()
            publish(partial, target)
            remove(partial)
        except BaseException:
            if not journal.done:
                remove(partial)
            raise
        finally:
            journal.close()

    def _write_rest(self, contents: Path) -> None:
        """The small files, durably; what is neither theirs nor the plan's has no place here."""
        config = self.checkpoint.config
        small = write_small_files(contents, self.copied, config, self.weights, self.rotate, self.plan)
        wanted = {*small, *(contents / file.name for file in self.plan.files)}
        for path in contents.rglob("*"):
            if path.is_file() and path not in wanted:
                path.unlink()
        for path in small:
            sync(path)
        open_checkpoint(contents)


def _identity(conversion: _Conversion, shard_bytes: int, step_bytes: int) -> dict[str, Any]:
    """What makes two conversions the same, but for the contents of the source's weight files."""
    directory = conversion.checkpoint.directory
    config, plan = hashlib.sha256(), hashlib.sha256()
    for name in ("config.json", OFFICIAL_INDEX):
        config.update((directory / name).read_bytes())
    for step in conversion.plan.steps:
        plan.update(repr([(p.spec.name, p.begin, p.end, p.outputs[0].offset) for p in step.pieces]).encode())
    return {
        "source": str(directory.resolve()),
        "config and index": config.hexdigest()[:16],
        "--weights": conversion.weights.value,
        "--shard-size": shard_bytes,
        "--rotate": "quarot" if conversion.rotate else "none",
        "step size": step_bytes,
        "plan (of another version?)": plan.hexdigest()[:16],
    }


def _fingerprints(checkpoint: Checkpoint) -> dict[str, str]:
    result = {}
    for file in sorted(set(checkpoint.files.values())):
        status = (checkpoint.directory / file).stat()
        result[file] = f"{status.st_size} bytes, modified {status.st_mtime_ns}, changed {status.st_ctime_ns}"
    return result


def _locations(step: Step, checkpoint: Checkpoint) -> Mapping[str, Location]:
    """Where the source tensors lie that a step needs."""
    keys = {stored.key for piece in step.pieces for stored in piece.spec.official()}
    keys |= {piece.rotation.norm for piece in step.pieces if piece.rotation is not None and piece.rotation.norm}
    return {key: checkpoint.locations[key] for key in keys}


def _check_room(partial: Path, plan: Plan, small: int) -> None:
    present = sum(path.stat().st_blocks * 512 for path in partial.rglob("*") if path.is_file())
    free, needed = shutil.disk_usage(partial).free, plan.bytes + small - present
    if free < needed:
        raise CheckpointError(
            f"{partial.parent}: {free >> 20} MiB free, the conversion needs {needed >> 20} MiB"
            + (" more" if present else "")
        )


def _make_files(plan: Plan, contents: Path, journal: Journal) -> None:
    """Files of their final size, with header and without data. One that is not as it should be is made again."""
    contents.mkdir(exist_ok=True)
    steps: dict[str, set[int]] = {}
    for step in plan.steps:
        for name in step.files:
            steps.setdefault(name, set()).add(step.number)
    for file in plan.files:
        path = contents / file.name
        begin, _, size = file.header()
        if path.is_file() and path.stat().st_size == size:
            with path.open("rb") as present:
                if present.read(len(begin)) == begin:
                    continue
        if steps[file.name] & journal.done:
            journal.withdraw(steps[file.name], plan)  # before: an empty file of this name must never count as done
        try:
            with path.open("wb") as new:
                new.write(begin)
                new.truncate(size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be made with {size} bytes ({error.strerror})") from error


def _write_weights(
    checkpoint: Checkpoint,
    plan: Plan,
    contents: Path,
    weights: Weights,
    journal: Journal,
    workers: int | None,
    progress: Progress,
) -> None:
    _make_files(plan, contents, journal)
    steps = [step for step in plan.steps if step.number not in journal.done]
    workers = max(1, min(workers or len(os.sched_getaffinity(0)), len(steps)))
    if not native.available:
        log.warning(
            "the compiled kernels are missing, the conversion runs the reference, ten to thirty times slower; "
            "install gcc and install this package again"
        )
    open_steps = Counter(file for step in steps for file in step.files)
    whole = [file.name for file in plan.files if not open_steps[file.name] and file.name not in journal.on_disk]
    jobs: Iterator[Job] = ((step, _locations(step, checkpoint)) for step in steps)
    progress.begin(plan.bytes, plan.bytes - sum(step.bytes for step in steps))
    try:
        with ThreadPoolExecutor(1) as syncer:  # the disk is forced in the background, one file at a time
            syncing = {file: syncer.submit(sync, contents / file) for file in whole}
            try:
                for step in run_steps(jobs, workers, checkpoint.directory, contents, weights):
                    journal.add(step.number)
                    progress.advance(step.bytes, step.pieces[-1].spec.name)
                    open_steps.subtract(step.files)
                    for file in step.files:
                        if not open_steps[file]:
                            syncing[file] = syncer.submit(sync, contents / file)
                    _note_synced(syncing, journal, plan)
                wait(syncing.values())
            finally:  # whatever ended the loop: a failure to write must not be lost, the system reports it once
                for future in syncing.values():
                    future.cancel()
                wait(syncing.values())
                _note_synced(syncing, journal, plan)
    finally:
        progress.end()


def _note_synced(syncing: dict[str, Future[None]], journal: Journal, plan: Plan) -> None:
    """Those that have ended, into the journal. Raises CheckpointError if one failed."""
    failed: dict[str, BaseException] = {}
    for file, future in list(syncing.items()):
        if not future.done() or future.cancelled():
            continue
        del syncing[file]
        if (error := future.exception()) is None:
            journal.synced(file)
        else:  # pages may be lost
            journal.withdraw({step.number for step in plan.steps if file in step.files}, plan)
            failed[file] = error
    for file, error in failed.items():
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{file}: cannot be written to the disk ({reason}), {AGAIN}") from error
