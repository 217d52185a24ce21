"""Checkpoints as vllm-ascend 0.30.0rc2 can read them."""

from __future__ import annotations

import json
from pathlib import Path

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
