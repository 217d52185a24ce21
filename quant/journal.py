"""Which steps of a conversion are done: one line of JSON each, so that a rerun goes on where a killed run stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import CheckpointError
from .plan import Plan
from .work import AGAIN

FORMAT = 1


def boot_id() -> str:
    """Changes with every start of the machine: written pages survive a killed process, but not a lost machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


class Journal:
    """``path``, opened for one conversion. ``identity``: what must be equal for a rerun to go on: config and options;
    ``sources``: a fingerprint of each source file; ``reads``: the source files that each step reads.

    ``done``: numbers of the steps whose bytes are certainly in the files. A step counts from the moment its line is
    written, unless a source file of it has changed since; after a restart of the machine only steps of files that were
    forced to the disk count. ``finished``: the contents were complete. Raises CheckpointError for a journal of another
    conversion.
    """

    def __init__(
        self,
        path: Path,
        identity: Mapping[str, Any],
        sources: Mapping[str, str],
        reads: Mapping[int, set[str]],
        plan: Plan,
    ) -> None:
        self.done: set[int] = set()
        self.finished = False
        self._path = path
        self.on_disk: set[str] = set()  # files all of whose steps are there to stay
        header = {"format": FORMAT, "identity": dict(identity), "sources": dict(sources), "boot": boot_id()}
        lines = self._lines(path)
        if lines:
            self._check(path, lines[0], header)
            before = lines[0]["sources"]
            changed = {file for file, fingerprint in sources.items() if before.get(file) != fingerprint}
            self._replay(lines, plan, {step for step, files in reads.items() if files & changed})
        # rewritten at once: a torn last line disappears, and the header names this boot
        new = path.with_name(f"{path.name}.new")
        self._descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        self._append(header, *({"synced": file} for file in sorted(self.on_disk)))
        self._append(*({"done": step} for step in sorted(self.done)), *([{"finished": True}] if self.finished else []))
        os.fsync(self._descriptor)
        new.rename(path)

    @staticmethod
    def _lines(path: Path) -> list[dict[str, Any]]:
        lines = []
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                break  # torn by the end of the process that wrote it
            if not isinstance(entry, dict):
                break
            lines.append(entry)
        return lines

    @staticmethod
    def _check(path: Path, found: dict[str, Any], header: dict[str, Any]) -> None:
        if found.get("format") != FORMAT or not all(isinstance(found.get(k), dict) for k in ("identity", "sources")):
            raise CheckpointError(f"{path}: was written by another version; remove {path.parent} to start anew")
        wanted, other = header["identity"], found["identity"]
        differs = [f"{key} {other.get(key)} (now {value})" for key, value in wanted.items() if other.get(key) != value]
        if differs:
            raise CheckpointError(
                f"{path.parent}: holds an interrupted conversion with another {', '.join(differs)}; run that command "
                "again to finish it, or remove the directory to start anew"
            )

    def _replay(self, lines: list[dict[str, Any]], plan: Plan, changed: set[int]) -> None:
        files = {step.number: step.files for step in plan.steps}
        same_boot = lines[0].get("boot") == boot_id()
        for entry in lines:
            step, undone, synced = entry.get("done"), entry.get("undone", []), entry.get("synced")
            if type(step) is int and step in files:
                self.done.add(step)
            if isinstance(undone, list):
                self._forget({number for number in undone if type(number) is int and number in files}, files)
            if isinstance(synced, str):
                self.on_disk.add(synced)
            self.finished |= "finished" in entry
        self._forget(changed, files)
        if not same_boot:
            self.done = {step for step in self.done if files[step] <= self.on_disk}
        self._forget(set(files) - self.done, files)

    def _forget(self, steps: set[int], files: Mapping[int, set[str]]) -> None:
        self.done -= steps
        self.on_disk -= {file for step in steps for file in files[step]}
        self.finished &= not steps

    def _append(self, *entries: Mapping[str, Any]) -> None:
        data = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written ({error.strerror}); make room, {AGAIN}") from error

    def withdraw(self, steps: set[int], plan: Plan) -> None:
        """These steps are to be done again: known, and on the disk, before anything happens to their files."""
        self._forget(steps, {step.number: step.files for step in plan.steps})
        self._append({"undone": sorted(steps)})
        os.fsync(self._descriptor)

    def add(self, step: int) -> None:
        """The step's bytes are written."""
        self.done.add(step)
        self._append({"done": step})

    def synced(self, file: str) -> None:
        """All steps of this file are on the disk."""
        self.on_disk.add(file)
        self._append({"synced": file})
        os.fsync(self._descriptor)

    def finish(self) -> None:
        """The contents are complete and on the disk."""
        self.finished = True
        self._append({"finished": True})
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
