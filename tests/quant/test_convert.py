"""Conversions: layout, exactness, and nothing half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vllm_ascend_dsv41.quant import CheckpointError, Layout, Weights, convert, open_checkpoint
from vllm_ascend_dsv41.quant import convert as convert_function
from vllm_ascend_dsv41.reference import Checkpoint

convert_module = sys.modules["vllm_ascend_dsv41.quant.convert"]


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
        "engram_int8/layers_1_engram_embed.weight.safetensors",
        "engram_int8/layers_1_engram_embed.scale.safetensors",
        "engram_int8/layers_4_engram_embed.weight.safetensors",
        "engram_int8/layers_4_engram_embed.scale.safetensors",
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
        assert torch.allclose(scale[:, 0] * 127, wanted.abs().amax(1)), key


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


def test_shard_size_and_streaming_change_nothing(official, converted, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "TABLE_ROWS", 777)
    other = convert(official("a"), tmp_path / "small", Weights.W8A8, shard_bytes=300_000)
    files = sorted(other.glob("quant_model_weights-*"))
    assert len(files) > 10
    assert all(file.stat().st_size < 400_000 or len(open_keys(file)) <= 3 for file in files)
    one, two = tensors(converted("a", "w8a8")), tensors(other)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


def open_keys(path: Path) -> list[str]:
    """Keys of one file."""
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def test_a_foreign_directory_of_that_name_is_kept(official, tmp_path):
    foreign = tmp_path / ".out.dsv41-partial"
    foreign.mkdir()
    (foreign / "precious").write_text("data")
    with pytest.raises(CheckpointError, match="is no remainder of a conversion; move it away"):
        convert_function(official("a"), tmp_path / "out", Weights.W8A8)
    assert (foreign / "precious").read_text() == "data"


def test_a_target_made_meanwhile_is_kept(official, tmp_path, monkeypatch):
    def made(*args: object) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()

    monkeypatch.setattr(convert_module, "_write_descriptions", made)
    monkeypatch.setattr(convert_module, "open_checkpoint", lambda path: open_checkpoint(official("a")))
    with pytest.raises(CheckpointError, match="was made by somebody else meanwhile"):
        convert_function(official("a"), tmp_path / "out", Weights.BF16)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_stale_description_in_the_source_is_not_copied(official, converted, tmp_path):
    import shutil

    source = tmp_path / "source"
    shutil.copytree(official("a"), source)
    (source / "quant_model_description.json").write_text('{"stale": true}')
    convert_function(source, tmp_path / "out", Weights.BF16)
    own, wanted = (d / "quant_model_description.json" for d in (tmp_path / "out", converted("a", "bf16")))
    assert own.read_bytes() == wanted.read_bytes()


def test_dangling_link_as_target(official, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="exists already"):
        convert_function(official("a"), tmp_path / "out", Weights.W8A8)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_command_leaves_nothing(official, tmp_path, signum):
    code = SLOW.replace("convert(sys.argv[1], sys.argv[2], Weights.BF16)", COMMAND)
    command = [sys.executable, "-c", code, str(official("a")), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signum)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert error == "dsv41: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_nohup_is_respected(official, tmp_path):
    code = SLOW.replace("convert(sys.argv[1], sys.argv[2], Weights.BF16)", COMMAND).replace("sleep(60)", "sleep(1)")
    command = [sys.executable, "-c", code, str(official("a")), str(tmp_path / "out"), "nohup"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGHUP)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    open_checkpoint(tmp_path / "out")


def test_existing_target_is_kept(official, tmp_path):
    target = tmp_path / "there"
    target.mkdir()
    (target / "precious").write_text("data")
    with pytest.raises(CheckpointError, match="exists already"):
        convert_function(official("a"), target, Weights.W8A8)
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "precious"]


def test_an_error_leaves_nothing(official, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert_module, "_write_table", fail)
    with pytest.raises(OSError, match="No space left"):
        convert_function(official("a"), tmp_path / "out", Weights.W8A8)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_refused_before_writing(official, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="0 MiB free, the conversion needs"):
        convert_function(official("a"), tmp_path / "out", Weights.W8A8)
    assert list(tmp_path.iterdir()) == []


def test_a_bad_scale_is_found(official, tmp_path):
    """Scale code 255 is NaN: refused, not written as garbage."""
    import shutil

    from safetensors.torch import load_file, save_file

    source = tmp_path / "damaged"
    shutil.copytree(official("a"), source)
    file = source / "model-00004-of-00016.safetensors"
    data = load_file(file)
    key = "layers.1.ffn.experts.3.w2.scale"
    data[key].view(torch.uint8)[0, 0] = 255
    save_file(data, file)
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.experts\.3\.w2\.weight holds NaN or infinity"):
        convert_function(source, tmp_path / "out", Weights.W8A8)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


COMMAND = 'from vllm_ascend_dsv41.cli import main; sys.exit(main(["quantize", sys.argv[1], sys.argv[2]]))'
SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that started us in the background had it ignored
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
from vllm_ascend_dsv41.quant import Weights, convert
import vllm_ascend_dsv41.quant.convert
module = sys.modules["vllm_ascend_dsv41.quant.convert"]
right = module._write_weights
def slow(*args):
    print("writing", flush=True)
    time.sleep(60)
    right(*args)
module._write_weights = slow
convert(sys.argv[1], sys.argv[2], Weights.BF16)
"""


def test_kill_and_two_at_once(official, tmp_path):
    target = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(official("a")), str(target)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        with pytest.raises(CheckpointError, match="another conversion is writing it"):
            convert_function(official("a"), target, Weights.BF16)
        assert (tmp_path / ".out.dsv41-partial").is_dir()  # the refused one did not touch it
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    time.sleep(0.1)
    assert not target.exists()
    convert_function(official("a"), target, Weights.BF16)  # what the killed one left is cleared
    open_checkpoint(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
