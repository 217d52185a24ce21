"""Checkpoints whose drafts are good or useless on purpose: the generator's own weights are random, so nothing in them
agrees. Both are made from a conversion to BF16 of preset a or c."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FIRST, LAST = 3, 370  # text tokens
NEVER = 5  # what a useless draft says


def edit(source: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Copy a checkpoint, changing its embedding, its head and the draft's tensors."""
    shutil.copytree(source, target)
    tensors, files = {}, {}
    for file in sorted(target.glob("*.safetensors")):
        for name, value in load_file(file).items():
            if name in ("embed.weight", "head.weight") or name.startswith("mtp."):
                tensors[name], files[name] = value, file
    before = {name: value.dtype for name, value in tensors.items()}
    change(tensors)
    for file in set(files.values()):
        content = load_file(file)
        content.update({n: v.to(before[n]).clone() for n, v in tensors.items() if files[n] == file})
        save_file(content, file, metadata={"format": "pt"})
    return target


def _last(tensors: dict[str, Tensor]) -> str:
    return max(name.split(".")[1] for name in tensors if name.startswith("mtp."))


def _set_head(tensors: dict[str, Tensor], head: Tensor) -> None:
    tensors["head.weight"] = tensors[f"mtp.{_last(tensors)}.head.weight"] = head


def _set_markov(tensors: dict[str, Tensor], embed: Tensor, head: Tensor) -> None:
    prefix = f"mtp.{_last(tensors)}.markov_head"
    tensors[f"{prefix}.embed.weight"], tensors[f"{prefix}.head.weight"] = embed, head


def good(wrong: float = 0.15, gain: float = 400.0, certainty: float = 12.0) -> Callable[[dict[str, Tensor]], None]:
    """Trunk and draft mostly agree on the successor of a token; ``wrong``: share of tokens for which the draft learnt
    another one, so that every accepted length occurs; ``gain``: how certain the draft is, ``certainty``: and the
    trunk."""

    def change(tensors: dict[str, Tensor]) -> None:
        source = torch.Generator().manual_seed(1)
        successor = torch.arange(len(tensors["embed.weight"]))
        successor[FIRST:LAST] = torch.randperm(LAST - FIRST, generator=source) + FIRST
        embed = tensors["embed.weight"].float()
        head = torch.zeros_like(embed)
        head[successor] = torch.nn.functional.normalize(embed, dim=1) * certainty
        head[:FIRST] = head[LAST:] = 0  # special tokens end nothing here
        _set_head(tensors, head)
        shape = tensors[f"mtp.{_last(tensors)}.markov_head.head.weight"].shape
        rows = torch.nn.functional.normalize(torch.randn(shape, generator=source), dim=1)
        mistaken = torch.rand(len(rows), generator=source) < wrong
        _set_markov(tensors, rows[successor.where(~mistaken, successor.roll(1))] * gain, rows)

    return change


def useless(tensors: dict[str, Tensor]) -> None:
    """The draft says one token that the trunk never does."""
    head = tensors["head.weight"].clone()
    head[NEVER] = 0
    _set_head(tensors, head)
    embed = torch.zeros_like(tensors[f"mtp.{_last(tensors)}.markov_head.embed.weight"])
    rows = torch.zeros_like(embed)
    embed[:, 0], rows[NEVER, 0] = 1000.0, 1000.0
    _set_markov(tensors, embed, rows)


#: ``soft``: for sampling, neither side is certain.
DRAFTS = {"good": good(), "soft": good(wrong=0.1, gain=6.5, certainty=0.75), "useless": useless}
