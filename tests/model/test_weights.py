"""The weight table accounts for every key exactly once."""

from __future__ import annotations

import re

import pytest

from vllm_ascend_dsv41.model import weights
from vllm_ascend_dsv41.model.weights import DraftCopy, Load, LoadExpert, LoadImages, Skip, Table, find_rule
from vllm_ascend_dsv41.quant import open_checkpoint
from vllm_ascend_dsv41.quant.checkpoint import CheckpointError


@pytest.mark.parametrize("kind", ["w8a8", "bf16"])
@pytest.mark.parametrize("preset", ["a", "b", "c"])
def test_every_key_has_one_rule(converted, preset, kind):
    found = {key: find_rule(key)[0] for key in open_checkpoint(converted(preset, kind)).files}
    kinds = {Load, LoadExpert, LoadImages, Table, DraftCopy}
    assert {type(rule) for rule in found.values()} == kinds | ({Skip} if kind == "w8a8" else set())
    skipped = [key for key, rule in found.items() if isinstance(rule, Skip)]
    assert all(re.match(r"(layers|mtp)\..*\.weight_offset$", key) for key in skipped)


def test_every_rule_is_needed(converted):
    keys = [*open_checkpoint(converted("a", "w8a8")).files, *open_checkpoint(converted("c", "bf16")).files]
    used = {id(find_rule(key)[0]) for key in keys}
    assert used == {id(rule) for rule in weights.RULES}


def test_unknown_key():
    with pytest.raises(CheckpointError, match=r"0 rules of the weight table match tensor layers\.0\.attn\.wz\.weight"):
        find_rule("layers.0.attn.wz.weight")


def test_a_parameter_without_tensor_is_found(converted, monkeypatch):
    """A rule that is lost must not leave a parameter uninitialised."""
    from serving.harness import Engine

    rules = [(p, Skip(r.pattern, "lost") if r.pattern == r"norm\.weight" else r) for p, r in weights._COMPILED]
    monkeypatch.setattr(weights, "_COMPILED", tuple(rules))
    with pytest.raises(CheckpointError, match=r"no tensor for model\.norm\.weight"):
        Engine(str(converted("a", "bf16")))
