"""Numbers: what holds passes, in every layout; what is damaged is named."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_ascend_dsv41.verify import verify

from .damage import INDEX, SHARD, edit_json, edit_tensors, failed, nan


@pytest.mark.parametrize("weights", ["w8a8", "bf16", "w8a8-quarot", "bf16-quarot"])
@pytest.mark.parametrize("sample", [None, 1, 2, 5])
def test_conversions_hold(official, converted, weights, sample):
    report = verify(converted("a", weights), official("a"), sample)
    assert report.holds, report.findings
    assert {finding.verdict for finding in report.findings} == {"PASS"}
    structure = {"links", "structure", "files", "index", "labels"}
    content = {"constants", "config", "rotation", "values", "source", "numbers"}
    assert {finding.check for finding in report.findings} == structure | content
    assert len(report.tensors) == 758
    largest = max(tensor.relative_error for tensor in report.tensors)
    assert largest < (0.02 if "w8a8" in weights else 0.003)
    if weights == "bf16":
        assert largest == 0


def test_models_without_draft_engram_or_pictures(tmp_path):
    """Every part that a config may leave out."""
    from vllm_ascend_dsv41.quant import Weights, convert
    from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes, write_checkpoint

    write_checkpoint(Sizes(**PRESETS["a"]), tmp_path / "whole")
    source = tmp_path / "source"
    shutil.copytree(tmp_path / "whole", source)
    unwanted = ("mtp.", "vision.", "aligner.", "image_", "layers.1.engram.", "layers.4.engram.")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        kept = {key: value for key, value in load_file(source / file).items() if not key.startswith(unwanted)}
        (source / file).unlink()
        if kept:
            save_file(kept, source / file)
    kept_map = {key: file for key, file in index["weight_map"].items() if not key.startswith(unwanted)}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept_map}))

    def without(config: dict) -> None:
        text = config["text_config"]
        for key in [key for key in text if key.startswith(("engram_", "dspark_"))]:
            del text[key]
        del text["num_nextn_predict_layers"]
        text["compress_ratios"] = text["compress_ratios"][: text["num_hidden_layers"]]
        config["vision_config"] = None

    edit_json(source / "config.json", without)
    for rotate in (False, True):
        target = convert(source, tmp_path / f"out-{rotate}", Weights.W8A8, rotate=rotate)
        report = verify(target, source, None)
        assert report.holds, report.findings
    assert verify(source).holds


@pytest.mark.parametrize(
    ("key", "damage", "detail"),
    [
        ("layers.3.attn.wq_a.weight_scale", nan, "NaN or infinity in rows 0 to"),
        ("layers.3.attn.wq_a.weight_scale", lambda t: t.fill_(torch.inf), "NaN or infinity"),
        ("layers.3.attn.wq_a.weight_scale", lambda t: t[40].neg_(), "a negative scale"),
        ("layers.3.attn.wq_a.weight_scale", lambda t: t[40].zero_(), "codes under a scale of 0"),
        ("layers.3.attn.wq_a.weight_offset", lambda t: t[9].fill_(7), "an offset that is not 0"),
        ("layers.3.ffn.experts.5.w1.weight", lambda t: t[8, 3].fill_(-128), "code -128"),
        ("embed.weight", nan, "NaN or infinity"),
        ("mtp.0.embed.weight", nan, "NaN or infinity"),
        ("layers.0.hc_attn_fn", lambda t: t[0, 0].fill_(torch.inf), "NaN or infinity"),
        ("layers.1.engram.embed.scale", nan, "NaN or infinity"),
    ],
)
def test_values_that_no_checkpoint_holds(copy, key, damage, detail):
    """Found without the source."""
    directory = copy()
    file = json.loads((directory / INDEX).read_text())["weight_map"][key]
    edit_tensors(directory / file, lambda tensors: damage(tensors[key]))
    found = failed(directory)
    assert detail in found["values"]


def test_nan_in_a_scale_of_the_source_layout(source):
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    key = "layers.2.attn.wq_b.scale"
    edit_tensors(source / weight_map[key], lambda t: t[key].view(torch.uint8).fill_(255))
    assert f"{key}: NaN or infinity" in failed(source)["values"]


@pytest.mark.parametrize(
    ("weights", "key", "damage", "detail"),
    [
        ("w8a8", "layers.3.attn.wq_a.weight_scale", lambda t: t.mul_(1.02), "wq_a.weight: the scale of row 0 is"),
        (
            "w8a8",
            "layers.3.ffn.experts.5.w1.weight",
            lambda t: t[7, 9].add_(3),
            "experts.5.w1.weight: row 7, column 9 is",
        ),
        ("w8a8", "layers.2.attn.wo_a.weight", lambda t: t[1, 1].add_(1), "wo_a.weight: row 1, column 1"),
        ("w8a8", "mtp.1.attn.attn_sink", lambda t: t[2].add_(1), "mtp.1.attn.attn_sink: row 0, column 2"),
        ("w8a8-quarot", "layers.2.attn.wo_b.weight", lambda t: t[1, 1].add_(1), "wo_b.weight: row 1, column 1"),
        ("w8a8-quarot", "mtp.2.head.weight", lambda t: t[4].mul_(1.1), "mtp.2.head.weight: row 4"),
    ],
)
def test_numbers(official, copy, weights, key, damage, detail):
    directory = copy(weights)
    edit_tensors(directory / SHARD, lambda tensors: damage(tensors[key]))
    found = failed(directory, official("a"))
    assert set(found) == {"numbers"}
    assert detail in found["numbers"]


@pytest.mark.parametrize("weights", ["w8a8", "bf16", "w8a8-quarot"])
@pytest.mark.parametrize("key", ["layers.3.attn.wq_a.weight_scale", "layers.2.attn.wo_a.weight", "mtp.2.head.weight"])
def test_nan_is_not_close_to_anything(official, copy, weights, key):
    if weights == "bf16":
        key = key.removesuffix("_scale")
    directory = copy(weights)
    edit_tensors(directory / SHARD, lambda tensors: nan(tensors[key]))
    assert key.removesuffix("_scale") in failed(directory, official("a"))["numbers"]


def test_a_scale_so_large_that_half_a_step_is_everything(official, copy):
    directory = copy()

    def zero(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.3.attn.wq_a.weight"].zero_()
        tensors["layers.3.attn.wq_a.weight_scale"].fill_(1e30)

    edit_tensors(directory / SHARD, zero)
    assert (
        "wq_a.weight: the scale of row 0 is 1e+30, the source asks for" in failed(directory, official("a"))["numbers"]
    )


def test_float32_is_compared_as_such_after_a_rotation(official, copy):
    directory = copy("w8a8-quarot")
    edit_tensors(directory / SHARD, lambda tensors: tensors["layers.2.hc_attn_fn"].mul_(1.003))
    assert "layers.2.hc_attn_fn: row 0" in failed(directory, official("a"))["numbers"]


def test_engram_shifted_by_one_row(official, copy):
    directory = copy()
    table = directory / "layers_1_engram_embed.weight.safetensors"
    edit_tensors(table, lambda t: t.update({k: v.roll(1, 0) for k, v in t.items()}))
    assert "layers.1.engram.embed.weight: row" in failed(directory, official("a"), sample=1)["numbers"]


def test_two_experts_exchanged(official, copy):
    directory = copy()

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight", "weight_scale"):
            one, two = (f"layers.3.ffn.experts.{expert}.w2.{part}" for expert in (1, 2))
            tensors[one], tensors[two] = tensors[two], tensors[one]

    edit_tensors(directory / SHARD, swap)
    detail = failed(directory, official("a"), sample=1)["numbers"]
    assert "experts.1.w2.weight" in detail
    assert "experts.2.w2.weight" in detail


def test_another_source(official, converted):
    report = verify(converted("a", "w8a8"), official("b"))
    failures = {finding.check: finding.detail for finding in report.findings if finding.verdict == "FAIL"}
    assert "config.json: text_config is not the source's in " in failures["source"]
    assert [finding.check for finding in report.findings if finding.verdict == "SKIP"] == ["numbers"]


@pytest.mark.parametrize(
    ("name", "change", "detail"),
    [
        (
            "config.json",
            lambda c: c["vision_config"].update(rope_theta=500.0),
            "is not the source's in rope_theta",
        ),
        ("config.json", lambda c: c.update(image_token_id=5), "image_token_id is not the source's (5 instead of"),
        ("tokenizer.json", lambda t: t.update(version="2"), "tokenizer.json is not the source's"),
    ],
)
def test_other_than_the_source(official, copy, name, change, detail):
    directory = copy()
    edit_json(directory / name, change)
    assert detail in failed(directory, official("a"))["source"]
