"""Which steps of a conversion are done: one line of JSON each, so that a rerun goes on where a killed run stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import CheckpointError
from .plan import Plan

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
        self._synced: set[str] = set()
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
        self._append(header, *({"synced": file} for file in sorted(self._synced)))
        self._append(*({"done": step} for step in sorted(self.done)), *([{"finished": True}] if self.finished else []))
        os.fsync(self._descriptor)
        new.rename(path)

    @staticmethod
    def _lines(path: Path) -> list[dict[str, Any]]:
        lines = []
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
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
        self._synced = {entry["synced"] for entry in lines if "synced" in entry}
        same_boot = lines[0].get("boot") == boot_id()
        for entry in lines:
            step = entry.get("done")
            if step is not None and step not in changed and (same_boot or files[step] <= self._synced):
                self.done.add(step)
            self.finished |= "finished" in entry
        redone = {step.number for step in plan.steps} - self.done
        self._synced -= {file for step in redone for file in files[step]}
        self.finished &= not redone

    def _append(self, *entries: Mapping[str, Any]) -> None:
        os.write(self._descriptor, "".join(json.dumps(entry) + "\n" for entry in entries).encode())

    def add(self, step: int) -> None:
        """The step's bytes are written."""
        self.done.add(step)
        self._append({"done": step})

    def synced(self, file: str) -> None:
        """All steps of this file are on the disk."""
        self._synced.add(file)
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
