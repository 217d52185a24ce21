"""The checkpoint on this node: there, complete, and of the right kind, in a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ....quant import CheckpointError, Layout, open_checkpoint
from ....quant.rotation import FILE as ROTATION_FILE
from ....quant.rotation import read_block
from ..host import Host
from ..report import Result, bad, good, skip
from ..target import Target


def complete(host: Host, target: Target) -> Result:
    """Index, files, sizes, headers and description."""
    name = "checkpoint"
    if not target.model or target.recipe is None:
        return skip(name, "no MODEL_PATH given")
    path, wants = Path(target.model), target.recipe.checkpoint
    if wants == "official" and not path.exists():
        return skip(name, f"{target.model}: a name on a hub, for vLLM to resolve")
    if not path.is_absolute() and target.nodes > 1:
        return bad(name, f"{target.model}", "an absolute path, the same on all nodes", "give the whole path")
    try:
        found = open_checkpoint(path)
    except (CheckpointError, OSError, ValueError) as error:
        return bad(
            name,
            str(error),
            "a complete checkpoint",
            "copy it again, or convert it again: dsv41 quantize SRC DST; dsv41 verify says more",
        )
    if wants == "ascend" and found.layout is Layout.OFFICIAL:
        return bad(
            name, "the official checkpoint (MXFP4, MXFP8)", "its conversion", f"dsv41 quantize {target.model} DST"
        )
    if wants == "official" and found.layout is not Layout.OFFICIAL:
        return bad(name, "an Ascend conversion", "the official checkpoint", "vLLM's own kernels read the official one")
    block = read_block(path / ROTATION_FILE, found.config["text_config"]["hidden_size"])
    rotated = "" if block is None else ", rotated"
    return good(name, f"{found.weights.value if found.weights else 'official'}{rotated}, complete")


CHECKS: dict[str, Callable[[Host, Target], Result]] = {"checkpoint": complete}
