"""The model that is planned for: a checkpoint on this machine, or the released one by its sizes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from ...quant import Layout, identify, read_config
from ...quant.checkpoint import open_checkpoint
from ...quant.inventory import Weights
from ...quant.rotation import FILE as ROTATION_FILE
from ...quant.rotation import read_block
from .weights import Tensors, by_kind


def released_config() -> dict[str, Any]:
    """Config of the released DeepSeek-V4.1-Flash, as far as sizes go."""
    text = (files(__package__) / "released.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


@dataclass(frozen=True)
class Model:
    """The checkpoint that is planned for."""

    name: str
    config: Mapping[str, Any]
    weights: Weights
    rotated: bool

    @cached_property
    def tensors(self) -> Tensors:
        """Its inventory, by kind."""
        return by_kind(self.config)

    @classmethod
    def of(cls, path: Path | None, kind: str) -> Model:
        """From a directory, or the released sizes. Raises CheckpointError: no checkpoint, or of the other kind."""
        if path is None:
            return released()
        if kind == "official" or identify(path) is Layout.OFFICIAL:
            return cls(str(path), read_config(path), Weights.W8A8, False)
        checkpoint = open_checkpoint(path)
        block = read_block(path / ROTATION_FILE, checkpoint.config["text_config"]["hidden_size"])
        return cls(str(path), checkpoint.config, checkpoint.weights or Weights.W8A8, block is not None)


@cache
def released() -> Model:
    """The released model, converted by ``dsv41 quantize`` without rotation."""
    return Model("DeepSeek-V4.1-Flash, released sizes", released_config(), Weights.W8A8, False)
