"""Conversions: layout, exactness, and that how the work is cut changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_ascend_dsv41.quant import CheckpointError, Layout, Weights, convert, open_checkpoint, work
from vllm_ascend_dsv41.reference import Checkpoint


def tensors(directory: Path, suffix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor by key, through the index."""
    index = json.loads((directory / "quant_model_weights.safetensors.index.json").read_text())["weight_map"]
    result = {}
    for key, file in index.items():
        if key.endswith(suffix):
            with safe_open(directory / file, framework="pt") as opened:
                result[key] = opened.get_tensor(key)
    return result


@pytest.mark.parametrize("weights", ["w8a8", "bf16"])
@pytest.mark.parametrize("preset", ["a", "b", "c"])
def test_result_is_a_complete_checkpoint(converted, preset, weights):
    checkpoint = open_checkpoint(converted(preset, weights))
    assert checkpoint.layout is Layout.ASCEND
    assert checkpoint.weights is Weights(weights)


def test_files_of_the_w8a8_layout(converted):
    directory = converted("a", "w8a8")
    names = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "quant_model_description.json",
        "quant_model_weights.safetensors.index.json",
        "quant_model_weights-00001-of-00001.safetensors",
        "layers_1_engram_embed.weight.safetensors",
        "layers_1_engram_embed.scale.safetensors",
        "layers_4_engram_embed.weight.safetensors",
        "layers_4_engram_embed.scale.safetensors",
        "optional/quarot.safetensors",
    } == names
    config = json.loads((directory / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "ascend", "model_quant_type": "W8A8_DYNAMIC"}
    assert config["engram_rotation_config"]["value_basis"] == "quarot_global"
    with safe_open(directory / "optional/quarot.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("global_rotation"), torch.eye(256))
    index = json.loads((directory / "quant_model_weights.safetensors.index.json").read_text())["weight_map"]
    description = json.loads((directory / "quant_model_description.json").read_text())
    assert set(index) < set(description)  # one label per tensor key
    assert set(description) - set(index) == {"version", "model_quant_type", "group_size", "metadata", "optional"}


@pytest.mark.parametrize("preset", ["a", "b"])
def test_int8_weights_are_within_half_a_step(official, converted, preset):
    source, found = Checkpoint(official(preset)), tensors(converted(preset, "w8a8"))
    quantized = [key.removesuffix("_scale") for key in found if key.endswith(".weight_scale")]
    assert len(quantized) > 100
    for key in quantized:
        weight, scale = found[key], found[f"{key}_scale"]
        assert scale.dtype is torch.float32
        assert not found[f"{key}_offset"].any()
        wanted = source.linear(key.removesuffix(".weight")).weight
        assert ((weight.float() * scale - wanted).abs() <= scale * 0.5001).all(), key  # float32 ties
        absmax = wanted.abs().amax(1, keepdim=True).double()
        assert torch.equal(scale, scale.bfloat16().float()), key  # what a reader that keeps BF16 scales sees
        assert (scale.double() * 127 >= absmax).all(), key
        assert (scale.double() * 127 <= absmax * (1 + 2**-7)).all(), key


@pytest.mark.parametrize("weights", ["w8a8", "bf16"])
def test_float_tensors_are_exact(official, converted, weights):
    source, found = Checkpoint(official("a")), tensors(converted("a", weights))
    exact = 0
    for key, value in found.items():
        if key in source and value.is_floating_point() and not key.endswith("engram.embed.scale"):
            base = key.removesuffix(".weight")
            wanted = source.linear(base).weight if value.dim() == 2 and key.endswith(".weight") else source.vector(key)
            if key.endswith("engram.embed.weight"):
                wanted = source.table_rows(base, torch.arange(len(value)))
            assert torch.equal(value.float(), wanted), key
            exact += 1
    assert exact > (100 if weights == "w8a8" else 700)
    assert torch.equal(found["mtp.0.embed.weight"], found["embed.weight"])
    assert torch.equal(found["mtp.2.head.weight"], found["head.weight"])


def test_engram_rows(official, converted):
    source, found = Checkpoint(official("a")), tensors(converted("a", "w8a8"))
    codes, scale = found["layers.1.engram.embed.weight"], found["layers.1.engram.embed.scale"]
    wanted = source.table_rows("layers.1.engram.embed", torch.arange(len(codes)))
    assert torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))  # powers of two
    step = scale.repeat_interleave(32, 1)
    assert ((codes.float() * step - wanted).abs() <= step / 2).all()


def test_cuts_and_processes_change_nothing(official, converted, tmp_path, monkeypatch):
    """Small files, small steps, small blocks, two workers: the same tensors."""
    monkeypatch.setattr(work, "BLOCK_ELEMENTS", 5000)
    inline = convert(official("a"), tmp_path / "inline", Weights.W8A8, 300_000, step_bytes=50_000, workers=1)
    other = convert(official("a"), tmp_path / "small", Weights.W8A8, 300_000, step_bytes=50_000, workers=2)
    files = sorted(other.glob("quant_model_weights-*"))
    assert len(files) > 10
    assert all(file.stat().st_size < 400_000 or len(open_keys(file)) <= 3 for file in files)
    one, two = tensors(converted("a", "w8a8")), tensors(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    for file in files:
        assert file.read_bytes() == (inline / file.name).read_bytes()


def open_keys(path: Path) -> list[str]:
    """Keys of one file."""
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("options", [{}, {"rotate": True}])
@pytest.mark.parametrize("weights", ["w8a8", "bf16"])
def test_without_a_compiler_the_reference_writes_the_same(official, tmp_path, monkeypatch, caplog, weights, options):
    compiled = convert(official("b"), tmp_path / "compiled", Weights(weights), **options)
    monkeypatch.setattr(work.native, "available", False)
    clear = convert(official("b"), tmp_path / "clear", Weights(weights), workers=1, **options)
    assert "the conversion runs the reference, ten to thirty times slower; install gcc" in caplog.text
    for path in compiled.rglob("*.safetensors"):
        assert path.read_bytes() == (clear / path.relative_to(compiled)).read_bytes()


def test_a_stale_description_in_the_source_is_not_copied(official, converted, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(official("a"), source)
    (source / "quant_model_description.json").write_text('{"stale": true}')
    convert(source, tmp_path / "out", Weights.BF16)
    own, wanted = (d / "quant_model_description.json" for d in (tmp_path / "out", converted("a", "bf16")))
    assert own.read_bytes() == wanted.read_bytes()


def damaged(official: Path, copy: Path, key: str, place: tuple[int, int], value: int) -> Path:
    """A copy with one byte of one tensor changed."""
    shutil.copytree(official, copy)
    file = copy / json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"][key]
    data = load_file(file)
    data[key].view(torch.uint8)[place] = value
    save_file(data, file)
    return copy


@pytest.mark.parametrize(
    ("key", "place", "value", "message"),
    [
        (
            "layers.1.ffn.experts.3.w2.scale",
            (40, 1),
            255,
            r"experts\.3\.w2\.weight .* in row 40, at or behind column 32",
        ),
        (
            "layers.2.attn.wq_b.weight",
            (70, 5),
            0x7F,
            r"layers\.2\.attn\.wq_b\.weight .* in row 70, at or behind column 0",
        ),
        ("layers.1.engram.embed.scale", (501, 0), 255, r"layers\.1\.engram\.embed\.weight .* in row 501"),
        (
            "layers.0.attn.wo_a.weight",
            (33, 9),
            0xFF,
            r"layers\.0\.attn\.wo_a\.weight .* in row 33, at or behind column 0",
        ),
        ("layers.0.hc_attn_fn", (3, 4 * 7 + 3), 0x7E, None),
    ],
)
def test_a_value_that_is_not_finite_is_named(official, tmp_path, key, place, value, message):
    source = damaged(official("a"), tmp_path / "damaged", key, place, value)
    if message is None:  # a huge but finite number is a number
        convert(source, tmp_path / "out", Weights.W8A8)
        return
    with pytest.raises(CheckpointError, match=rf"damaged/model-.*{message}.*; download its file again"):
        convert(source, tmp_path / "out", Weights.W8A8, workers=1)
    assert not (tmp_path / "out").exists()
