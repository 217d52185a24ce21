"""Where every tensor of an Ascend checkpoint goes: one table, no other renaming anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..quant import Checkpoint
from ..quant.checkpoint import CheckpointError
from ..quant.rotation import FILE as ROTATION_FILE
from .parameters import CheckpointShapeError, copy_into


@dataclass(frozen=True)
class Load:
    """Tensors matching ``pattern`` go to parameter ``target``; ``part``: which part of a stacked one."""

    pattern: str
    target: str
    part: int | None = None


@dataclass(frozen=True)
class LoadImages(Load):
    """The vision tower's, which is not there when a server takes no images."""


@dataclass(frozen=True)
class LoadExpert:
    """Tensors of routed experts: the pattern's ``expert``, ``shard`` and ``kind`` groups say which."""

    pattern: str
    target: str


@dataclass(frozen=True)
class Table:
    """Engram tables, of which a rank reads its own rows: what vLLM's loader offers is left unread (it is mapped, not
    in memory)."""

    pattern: str


@dataclass(frozen=True)
class DraftCopy:
    """The draft's own copy of tensor ``source``, which it needs when the trunk is rotated; else it must be the same."""

    pattern: str
    target: str
    source: str


@dataclass(frozen=True)
class Skip:
    """Tensors that this model does not load, and why."""

    pattern: str
    reason: str


LAYER = r"(?P<block>(layers|mtp)\.\d+)"  # a layer of the trunk or a stage of the draft
TO = r"model.\g<block>"
DRAFT = r"mtp\.\d+"  # the draft's other tensors carry the number of its first or last stage
SUFFIX = r"(?P<suffix>weight|weight_scale)"

RULES: tuple[Load | LoadExpert | Table | DraftCopy | Skip, ...] = (
    Load(r"embed\.weight", "model.embed_tokens.weight"),
    Load(r"head\.weight", "lm_head.weight"),
    Load(r"norm\.weight", "model.norm.weight"),
    Load(rf"{LAYER}\.(?P<norm>attn_norm|ffn_norm)\.weight", rf"{TO}.\g<norm>.weight"),
    Load(rf"{LAYER}\.(?P<hc>hc_attn|hc_ffn)_(?P<name>fn|base|scale)", rf"{TO}.\g<hc>.\g<name>"),
    Load(rf"{LAYER}\.attn\.wq_a\.{SUFFIX}", rf"{TO}.attn.wqa_wkv.\g<suffix>", 0),
    Load(rf"{LAYER}\.attn\.wkv\.{SUFFIX}", rf"{TO}.attn.wqa_wkv.\g<suffix>", 1),
    Load(rf"{LAYER}\.attn\.(?P<name>wq_b|wo_a|wo_b|indexer\.wq_b)\.{SUFFIX}", rf"{TO}.attn.\g<name>.\g<suffix>"),
    Load(rf"{LAYER}\.attn\.(?P<name>q_norm|kv_norm)\.weight", rf"{TO}.attn.\g<name>.weight"),
    Load(rf"{LAYER}\.attn\.attn_sink", rf"{TO}.attn.attn_sink"),
    Load(rf"{LAYER}\.attn\.indexer\.(?P<name>wk|k_norm)\.weight", rf"{TO}.attn.compressor.\g<name>.weight"),
    Load(rf"{LAYER}\.attn\.indexer\.weights_proj\.weight", rf"{TO}.attn.indexer.weights_proj.weight"),
    Load(rf"{LAYER}\.attn\.compressor\.norm\.weight", rf"{TO}.attn.compressor.norm.weight"),
    # ratio 2 has a gate and stacks both; ratio 1 has wkv alone: see _compressor_target
    Load(rf"{LAYER}\.attn\.compressor\.wkv\.weight", rf"{TO}.attn.compressor.wkv_wgate.weight", 0),
    Load(rf"{LAYER}\.attn\.compressor\.wgate\.weight", rf"{TO}.attn.compressor.wkv_wgate.weight", 1),
    Load(rf"{LAYER}\.ffn\.gate\.(?P<name>weight|bias|bias_vl)", rf"{TO}.ffn.gate.\g<name>"),
    LoadExpert(
        rf"{LAYER}\.ffn\.experts\.(?P<expert>\d+)\.(?P<shard>w1|w2|w3)\.{SUFFIX}",
        rf"{TO}.ffn.experts.routed_experts",
    ),
    Load(rf"{LAYER}\.ffn\.shared_experts\.w1\.{SUFFIX}", rf"{TO}.ffn.shared_experts.gate_up_proj.\g<suffix>", 0),
    Load(rf"{LAYER}\.ffn\.shared_experts\.w3\.{SUFFIX}", rf"{TO}.ffn.shared_experts.gate_up_proj.\g<suffix>", 1),
    Load(rf"{LAYER}\.ffn\.shared_experts\.w2\.{SUFFIX}", rf"{TO}.ffn.shared_experts.down_proj.\g<suffix>"),
    Table(rf"{LAYER}\.engram\.embed\.(weight|scale)"),
    Load(rf"{LAYER}\.engram\.(?P<name>wkv\.weight|q_weight|k_weight)", rf"{TO}.engram.\g<name>"),
    Skip(r"(layers|mtp)\..*\.weight_offset", "symmetric quantisation: offsets are zero, which is checked"),
    Load(rf"{DRAFT}\.(?P<name>main_proj|main_norm|norm)\.weight", r"model.mtp.\g<name>.weight"),
    Load(rf"{DRAFT}\.markov_head\.(?P<name>embed|head)\.weight", r"model.mtp.markov_\g<name>.weight"),
    Load(rf"{DRAFT}\.confidence_head\.proj\.weight", "model.mtp.confidence_head.weight"),
    DraftCopy(rf"{DRAFT}\.embed\.weight", "model.mtp.embed_tokens.weight", "embed.weight"),
    DraftCopy(rf"{DRAFT}\.head\.weight", "model.mtp.head.weight", "head.weight"),
    LoadImages(r"(?P<name>(vision|aligner)\..*|image_(start|newline|end))", r"images.\g<name>"),
)
SHARED = frozenset(rule.source for rule in RULES if isinstance(rule, DraftCopy))
_COMPILED = tuple((re.compile(rule.pattern), rule) for rule in RULES)


def find_rule(key: str) -> tuple[Load | LoadExpert | Table | DraftCopy | Skip, re.Match[str]]:
    """The one rule for a checkpoint key. Raises CheckpointError when none or several match."""
    found = [(rule, match) for pattern, rule in _COMPILED if (match := pattern.fullmatch(key))]
    if len(found) != 1:
        raise CheckpointError(f"{len(found)} rules of the weight table match tensor {key}; exactly one must")
    return found[0]


def _target(model: nn.Module, name: str) -> tuple[str, nn.Parameter]:
    # a ratio-1 compressor has no gate to stack its matrix with
    for candidate in (name, name.replace(".wkv_wgate.", ".wkv.")):
        try:
            return candidate, model.get_parameter(candidate)
        except AttributeError:
            continue
    raise CheckpointError(f"the weight table names parameter {name}, which this model does not have")


def load_weights(model: Any, checkpoint: Checkpoint, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Load everything, account for every key and every parameter. Returns the loaded parameters' names.

    Raises CheckpointError naming what is missing, unknown, doubled or of another shape.
    """
    loaded: set[str] = set()
    seen: set[str] = set()
    shared: dict[str, dict[str, Tensor]] = {}  # source -> it and its copy, still in their files
    for key, value in weights:
        if key not in checkpoint.files:
            raise CheckpointError(f"{checkpoint.directory}: {key} is in a weight file but not in the index")
        if key in seen:
            raise CheckpointError(f"{checkpoint.directory}: {key} is in two weight files")
        seen.add(key)
        rule = find_rule(key)[0]
        if key in SHARED or isinstance(rule, DraftCopy):
            shared.setdefault(rule.source if isinstance(rule, DraftCopy) else key, {})[key] = value
        try:
            loaded.update(_load_one(model, key, value))
        except (CheckpointShapeError, AssertionError) as error:
            file = checkpoint.directory / checkpoint.files[key]
            raise CheckpointError(f"{file}: {key}: {error or 'has a shape that does not fit'}") from error
    if model.model.engram is not None:
        seen |= model.model.engram.tables.load()
    missing = sorted(set(checkpoint.files) - seen)
    if missing:
        raise CheckpointError(f"{checkpoint.directory}: not delivered by the weight loader: {', '.join(missing[:5])}")
    if model.model.mtp is not None and model.model.mtp.head is None:
        for tensors in shared.values():
            _check_equal(checkpoint, tensors)
    filled = {id(model.get_parameter(name)) for name in loaded}
    empty = [name for name, parameter in model.named_parameters() if id(parameter) not in filled]
    if empty:
        raise CheckpointError(f"{checkpoint.directory}: no tensor for {', '.join(empty[:5])}")
    for module in model.modules():
        after_loading = getattr(module, "after_loading", None)
        if after_loading is not None:
            after_loading()
    return loaded


def _check_equal(checkpoint: Checkpoint, tensors: dict[str, Tensor]) -> None:
    """A trunk that is not rotated and its draft have one embedding and one head."""
    (name, first), *others = tensors.items()
    for other, value in others:
        if not torch.equal(first, value):
            raise CheckpointError(
                f"{checkpoint.directory}: {name} and {other} differ though there is no {ROTATION_FILE}: it "
                "is missing, or one of them is from another conversion; convert again"
            )


def _load_one(model: Any, key: str, value: Tensor) -> Iterable[str]:
    rule, match = find_rule(key)
    if isinstance(rule, Skip):
        if key.endswith(".weight_offset") and value.any():
            raise CheckpointError(f"{key} is not zero: asymmetric quantisation is not supported; convert again")
        return ()
    draft = model.model.mtp
    if isinstance(rule, Table) or (draft is None and key.startswith("mtp.")):
        return ()
    if isinstance(rule, LoadImages) and model.images is None:
        return ()
    if isinstance(rule, DraftCopy) and draft.head is None:
        return ()
    if isinstance(rule, LoadExpert):
        stack = "w2" if match["shard"] == "w2" else "w13"
        name, parameter = _target(model, f"{match.expand(rule.target)}.{stack}_{match['suffix']}")
        loader: Any = parameter.weight_loader  # type: ignore[attr-defined]
        loader(parameter, value, name, shard_id=match["shard"], expert_id=int(match["expert"]))
        return (name,)
    name, parameter = _target(model, match.expand(rule.target))
    loader = getattr(parameter, "weight_loader", copy_into)
    part = getattr(rule, "part", None)
    loader(parameter, value, *(() if part is None else (part,)))
    return (name,)
