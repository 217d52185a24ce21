"""Tiny checkpoints as vllm-ascend 0.30.0rc2 can read them, made once per version of the converter."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from pathlib import Path

from .. import environment

INDEX = "quant_model_weights.safetensors.index.json"


def flat(source: Path, target: Path) -> Path:
    """A folder of links to a converted checkpoint, with the Engram tables beside the other shards.

    rc2 reads a table when vLLM's loader meets its name, and that loader looks at `*.safetensors` of the folder itself:
    tables in `engram_int8/` (the layout of published checkpoints) are never met, and rc2 serves rows that nobody wrote.
    """
    target.mkdir(parents=True)
    index = json.loads((source / INDEX).read_text())
    for name in sorted({*index["weight_map"].values()}):
        (target / name.replace("/", "-")).symlink_to(source.resolve() / name)
    index["weight_map"] = {tensor: name.replace("/", "-") for tensor, name in index["weight_map"].items()}
    (target / INDEX).write_text(json.dumps(index))
    for path in source.iterdir():
        if not (target / path.name).exists() and path.name != INDEX and (path.is_file() or path.name == "optional"):
            (target / path.name).symlink_to(path.resolve())
    return target


def _key() -> str:
    digest = hashlib.sha256()
    for folder in ("quant", "ops", "vllm_ascend_dsv41/tiny_checkpoint"):
        for path in sorted((environment.REPOSITORY / folder).glob("*.py")):
            digest.update(path.read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:16]


def converted(preset: str, weights: str, nested: bool = False) -> Path:
    """Folder of preset "a" or "c" in "bf16" or "w8a8"; nested: as the converter wrote it, tables in their own
    folder.
    """
    from vllm_ascend_dsv41.quant import Weights, convert
    from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes, write_checkpoint

    root = environment.cache() / f"checkpoints-{_key()}"
    root.mkdir(parents=True, exist_ok=True)
    done = root / f"{preset}-{weights}.done"
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            official = root / f"{preset}-official"
            if not (official / "complete").exists():
                shutil.rmtree(official, ignore_errors=True)
                write_checkpoint(Sizes(**PRESETS[preset]), official / "checkpoint")
                (official / "complete").touch()
            for name in (f"{preset}-{weights}", f"{preset}-{weights}-flat"):
                shutil.rmtree(root / name, ignore_errors=True)
            convert(official / "checkpoint", root / f"{preset}-{weights}", Weights(weights))
            flat(root / f"{preset}-{weights}", root / f"{preset}-{weights}-flat")
            done.touch()
    return root / (f"{preset}-{weights}" if nested else f"{preset}-{weights}-flat")
