"""The trained model that says things: a checkpoint in the official layout, made by training/train.py."""

from __future__ import annotations

import os
import shutil
from importlib.resources import as_file, files
from pathlib import Path


def write_talking(out: Path) -> None:
    """Copy it to ``out``, which appears when it is complete. Raises FileExistsError.

    It answers a few questions by heart, repeats the line behind "Repeat:", calls ``get_weather`` and ``square``, says
    what a tool said, and reads a digit from a picture of 84 x 84 pixels; its thoughts begin with the effort asked for.
    What it repeats must not hold a word twice: it looks for what followed a token before.
    """
    if out.exists():
        raise FileExistsError(f"{out}: is there already")
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        with as_file(files(__package__) / "talking") as source:
            shutil.copytree(source, partial)
        partial.replace(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
