"""Copies of checkpoints to damage; unchanged files are links."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copy(converted, tmp_path):
    """A copy of a conversion to damage."""

    def make(weights: str = "w8a8") -> Path:
        target = tmp_path / f"copy-{weights}"
        shutil.copytree(converted("a", weights), target, copy_function=lambda a, b: Path(b).hardlink_to(a))
        return target

    return make


@pytest.fixture
def source(official, tmp_path):
    """A copy of the official checkpoint to damage."""
    shutil.copytree(official("a"), tmp_path / "source", copy_function=lambda a, b: Path(b).hardlink_to(a))
    return tmp_path / "source"
