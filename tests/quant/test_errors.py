"""Bad checkpoints: one clear message, before data is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.quant import CheckpointError, open_checkpoint
from vllm_ascend_dsv41.quant.checkpoint import ConfigError

INDEX = {"official": "model.safetensors.index.json", "ascend": "quant_model_weights.safetensors.index.json"}


class Damaged:
    """A copy of a checkpoint to damage; files are linked, a changed one is replaced."""

    def __init__(self, source: Path, copy: Path, layout: str) -> None:
        shutil.copytree(source, copy, copy_function=lambda a, b: Path(b).hardlink_to(a))
        self.path, self.index = copy, copy / INDEX[layout]

    def edit_json(self, name: str, change) -> None:
        value = json.loads((self.path / name).read_text())
        change(value)
        (self.path / name).unlink()
        (self.path / name).write_text(json.dumps(value))

    def edit_tensors(self, key: str, change) -> None:
        file = self.path / json.loads(self.index.read_text())["weight_map"][key]
        data = load_file(file)
        change(data)
        file.unlink()
        save_file(data, file)


@pytest.fixture(params=["official", "ascend"])
def damaged(request, official, converted, tmp_path):
    source = official("a") if request.param == "official" else converted("a", "w8a8")
    return Damaged(source, tmp_path / "copy", request.param)


def message(directory: Path) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        open_checkpoint(directory)
    return str(caught.value)


def test_undamaged(damaged):
    assert open_checkpoint(damaged.path).tensors


def test_no_such_directory(tmp_path):
    assert "no such directory" in message(tmp_path / "nowhere")


def test_not_a_checkpoint(tmp_path):
    assert "not a checkpoint, config.json is missing" in message(tmp_path)


def test_another_model(damaged):
    damaged.edit_json("config.json", lambda c: c.update(model_type="deepseek_v4"))
    assert "model_type is 'deepseek_v4', expected 'deepseek_v41'" in message(damaged.path)


def test_config_is_not_json(damaged):
    (damaged.path / "config.json").unlink()
    (damaged.path / "config.json").write_text("{")
    assert "not readable as JSON" in message(damaged.path)


def test_no_index(damaged):
    damaged.index.unlink()
    assert "not a checkpoint, neither" in message(damaged.path)


def test_illegal_config(damaged):
    damaged.edit_json("config.json", lambda c: c["text_config"].update(kv_source_layer_ids=[5, 2]))
    assert "kv_source_layer_ids = [5, 2]" in message(damaged.path)


def test_missing_shard(damaged):
    file = sorted(damaged.path.glob("*.safetensors"))[0]
    file.unlink()
    assert f"files that the index names are missing: {file.name}" in message(damaged.path)


def test_cut_shard(damaged):
    file = sorted(damaged.path.glob("*.safetensors"))[0]
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-100])
    assert "its header promises" in message(damaged.path)


def test_empty_shard(damaged):
    file = sorted(damaged.path.glob("*.safetensors"))[0]
    file.unlink()
    file.touch()
    assert "too short for a safetensors file" in message(damaged.path)


def test_damaged_header(damaged):
    file = sorted(damaged.path.glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[8] = 0xFF
    file.unlink()
    file.write_bytes(data)
    assert "header is damaged" in message(damaged.path)


HEADERS = [
    b"[]",
    b"null",
    b'{"norm.weight": null}',
    b'{"norm.weight": {"dtype": "BF16"}}',
    b'{"norm.weight": {"dtype": "BF16", "shape": null, "data_offsets": [0, 512]}}',
    b'{"norm.weight": {"dtype": "BF16", "shape": [256], "data_offsets": [0]}}',
    b'{"norm.weight": {"dtype": "BF16", "shape": [-256], "data_offsets": [0, 512]}}',
    b'{"norm.weight": {"dtype": "BF16", "shape": [256.0], "data_offsets": [0, 512]}}',
    b'{"norm.weight": {"dtype": "Q4", "shape": [256], "data_offsets": [0, 512]}}',
    b'{"norm.weight": {"dtype": "BF16", "shape": [256], "data_offsets": [8, 520]}}',
    b'{"norm.weight": {"dtype": "BF16", "shape": [200], "data_offsets": [0, 512]}}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_odd_headers(damaged, header):
    file = sorted(damaged.path.glob("*.safetensors"))[0]
    file.unlink()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(512))
    text = message(damaged.path)
    assert str(file) in text
    assert "damaged" in text or "which cannot be right" in text


def test_a_huge_header_is_not_read(damaged):
    file = sorted(damaged.path.glob("*.safetensors"))[0]
    file.unlink()
    with file.open("wb") as out:
        out.write((3 << 30).to_bytes(8, "little"))
        out.truncate((3 << 30) + 8)
    assert "a header of 3221225472 bytes, at most 100000000 are allowed" in message(damaged.path)


def test_missing_scale(damaged):
    suffix = "scale" if "model.safetensors" in damaged.index.name else "weight_scale"
    key = f"layers.3.ffn.experts.7.w2.{suffix}"
    damaged.edit_json(damaged.index.name, lambda i: i["weight_map"].pop(key))
    assert f"tensors missing from the index: {key}" in message(damaged.path)


def test_unknown_tensor(damaged):
    damaged.edit_json(
        damaged.index.name, lambda i: i["weight_map"].update({"layers.3.attn.wz.weight": "x.safetensors"})
    )
    assert "tensors that this model does not have: layers.3.attn.wz.weight" in message(damaged.path)


def test_wrong_dtype(damaged):
    damaged.edit_tensors("norm.weight", lambda data: data.update({"norm.weight": data["norm.weight"].half()}))
    assert "norm.weight in" in message(damaged.path)
    assert "is F16 [256], expected" in message(damaged.path)


def test_narrowed_scales(converted, tmp_path):
    """Scales in BF16 lose accuracy without an error: refused."""
    damaged = Damaged(converted("a", "w8a8"), tmp_path / "copy", "ascend")
    key = "layers.0.attn.wq_b.weight_scale"
    damaged.edit_tensors(key, lambda data: data.update({key: data[key].bfloat16()}))
    assert f"{key} in" in message(damaged.path)
    assert "is BF16 [512, 1], expected F32 [512, 1]" in message(damaged.path)


def test_wrong_shape(damaged):
    damaged.edit_tensors("embed.weight", lambda data: data.update({"embed.weight": data["embed.weight"][:-1].clone()}))
    assert "is BF16 [383, 256], expected BF16 [384, 256]" in message(damaged.path)


def test_tensor_in_another_file(damaged):
    damaged.edit_tensors("norm.weight", lambda data: data.pop("norm.weight"))
    assert "norm.weight is not in" in message(damaged.path)


def test_index_pointing_outside(damaged):
    damaged.edit_json(damaged.index.name, lambda i: i["weight_map"].update({"norm.weight": "../secret"}))
    assert "not inside the checkpoint" in message(damaged.path)


def test_missing_description(converted, tmp_path):
    damaged = Damaged(converted("a", "w8a8"), tmp_path / "copy", "ascend")
    (damaged.path / "quant_model_description.json").unlink()
    assert "quant_model_description.json is missing" in message(damaged.path)


def test_wrong_label(converted, tmp_path):
    damaged = Damaged(converted("a", "w8a8"), tmp_path / "copy", "ascend")
    key = "layers.0.attn.wq_b.weight"
    damaged.edit_json("quant_model_description.json", lambda d: d.update({key: "W4A8"}))
    assert f"{key} is labelled 'W4A8', expected 'W8A8_DYNAMIC'" in message(damaged.path)


def test_several_problems_are_listed_together(damaged):
    def change(index: dict) -> None:
        index["weight_map"].pop("norm.weight")
        index["weight_map"]["extra"] = next(iter(index["weight_map"].values()))

    damaged.edit_json(damaged.index.name, change)
    text = message(damaged.path)
    assert "norm.weight" in text
    assert "extra" in text


def test_command_reports_one_line_and_writes_nothing(damaged, tmp_path, capsys):
    damaged.edit_json(damaged.index.name, lambda i: i["weight_map"].pop("norm.weight"))
    assert main(["quantize", str(damaged.path), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dsv41: error: ")
    assert "tensors missing from the index: norm.weight" in error
    assert {path.name for path in tmp_path.iterdir()} == {"copy"}


def test_converting_twice_is_refused(converted, tmp_path, capsys):
    assert main(["quantize", str(converted("a", "w8a8")), str(tmp_path / "out")]) == 1
    assert "already in the Ascend layout" in capsys.readouterr().err


def test_default_dtype_of_the_caller_does_not_matter(official, converted, tmp_path):
    from vllm_ascend_dsv41.quant import Weights, convert

    torch.set_default_dtype(torch.bfloat16)
    try:
        other = convert(official("a"), tmp_path / "out", Weights.W8A8)
    finally:
        torch.set_default_dtype(torch.float32)
    name = "quant_model_weights-00001-of-00001.safetensors"
    assert (other / name).read_bytes() == (converted("a", "w8a8") / name).read_bytes()
