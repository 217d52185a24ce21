"""Golden data, tiny checkpoints and their conversions, made once per run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# One process per engine and no look-ups: before anything imports vLLM.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_PLUGINS", "dsv41")

import pytest
import torch
from safetensors.torch import load_file
from spec_decode.weights import DRAFTS, edit
from torch import Tensor

from vllm_ascend_dsv41.quant import Weights, convert
from vllm_ascend_dsv41.reference import Checkpoint, Grid, Model
from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes, write_checkpoint

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def official(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of the official checkpoint of a preset."""
    root, made = tmp_path_factory.mktemp("official"), {}

    def make(preset: str) -> Path:
        if preset not in made:
            write_checkpoint(Sizes(**PRESETS[preset]), root / preset)
            made[preset] = root / preset
        return made[preset]

    return make


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, official: Callable[[str], Path]) -> Callable[[str, str], Path]:
    """Directory of a preset's conversion to ``w8a8`` or ``bf16``; ``w8a8-quarot`` and ``bf16-quarot``: rotated;
    ``bf16-good`` and others of ``spec_decode.weights.DRAFTS``: with such a draft."""
    root, made = tmp_path_factory.mktemp("converted"), {}

    def make(preset: str, weights: str) -> Path:
        key = f"{preset}-{weights}"
        if key not in made:
            kind, _, variant = weights.partition("-")
            if variant in DRAFTS:
                made[key] = edit(make(preset, kind), root / key, DRAFTS[variant])
            else:
                made[key] = convert(official(preset), root / key, Weights(kind), rotate=variant == "quarot")
        return made[key]

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[..., Model]:
    """Reference model of a checkpoint directory, in a grid and dtype."""
    made: dict[tuple[Path, Grid, torch.dtype], Model] = {}

    def make(directory: Path, grid: Grid = Grid.EXACT, dtype: torch.dtype = torch.float32) -> Model:
        key = (directory, grid, dtype)
        if key not in made:
            made[key] = Model(Checkpoint(directory), grid=grid, dtype=dtype)
        return made[key]

    return make


@pytest.fixture(scope="session")
def golden() -> Callable[[str, str], dict[str, Tensor]]:
    """Tensors of one golden file: ``golden("a", "text_0130.exact-fp32")``."""
    return lambda preset, name: load_file(GOLDEN / preset / "golden" / f"{name}.safetensors")
