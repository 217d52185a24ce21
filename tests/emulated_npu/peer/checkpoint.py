"""Tiny checkpoints as vllm-ascend 0.30.0rc2 can read them, made once per version of the converter."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from pathlib import Path

from .. import environment

INDEX = "quant_model_weights.safetensors.index.json"


def nested(source: Path, target: Path) -> Path:
    """A folder of links to a converted checkpoint, with the Engram tables in `engram_int8/` as in published ones.

    rc2 reads a table when vLLM's loader meets its name, and that loader looks at `*.safetensors` of the folder itself:
    such tables are never met, and rc2 serves rows that nobody wrote. Our converter puts them beside the other shards.
    """
    (target / "engram_int8").mkdir(parents=True)
    index = json.loads((source / INDEX).read_text())
    moved = {name: f"engram_int8/{name}" for name in {*index["weight_map"].values()} if "_engram_embed." in name}
    for path in source.iterdir():
        if path.name != INDEX:
            (target / moved.get(path.name, path.name)).symlink_to(path.resolve())
    index["weight_map"] = {tensor: moved.get(name, name) for tensor, name in index["weight_map"].items()}
    (target / INDEX).write_text(json.dumps(index))
    return target


def _key() -> str:
    digest = hashlib.sha256()
    for pattern in ("quant/*.py", "native/*.[ch]", "ops/*.py", "vllm_ascend_dsv41/tiny_checkpoint/*.py"):
        for path in sorted(environment.REPOSITORY.glob(pattern)):
            digest.update(path.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:16]


def converted(preset: str, weights: str) -> Path:
    """Folder of preset "a" or "c" in "bf16" or "w8a8", as the converter wrote it; "w8a8-quarot": rotated;
    "w8a8-nested": see `nested`.
    """
    from vllm_ascend_dsv41.quant import Weights, convert
    from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes, write_checkpoint

    kind, _, variant = weights.partition("-")
    root = environment.cache() / f"checkpoints-{_key()}"
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"{preset}-{weights}"
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        official = root / f"{preset}-official"
        if not (official / "complete").exists():
            shutil.rmtree(official, ignore_errors=True)
            write_checkpoint(Sizes(**PRESETS[preset]), official / "checkpoint")
            (official / "complete").touch()
        source = root / f"{preset}-{kind}{'-quarot' if variant == 'quarot' else ''}"
        if not source.exists():
            convert(official / "checkpoint", source, Weights(kind), rotate=variant == "quarot", workers=1)
        if variant == "nested" and not (target / INDEX).exists():
            shutil.rmtree(target, ignore_errors=True)
            nested(source, target)
    return target
