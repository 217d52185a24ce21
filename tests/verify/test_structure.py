"""Structure, config, rotation state: each kind of damage is found by the check that is made for it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.layer_plan import ConfigError
from vllm_ascend_dsv41.quant import CheckpointError
from vllm_ascend_dsv41.verify import verify

from .damage import DESCRIPTION, INDEX, SHARD, edit_json, edit_tensors, failed, rotation_file


def test_an_official_checkpoint(official):
    report = verify(official("a"))
    assert report.holds
    checks = {finding.check for finding in report.findings}
    assert checks == {"links", "structure", "files", "index", "constants", "config", "values"}


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"not a checkpoint, config\.json is missing"):
        verify(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        verify(tmp_path / "nowhere")


def test_links(copy):
    directory = copy()
    (directory / "old.safetensors").symlink_to("/nowhere/blob")
    assert failed(directory)["links"] == "dangling link old.safetensors -> /nowhere/blob"


def test_linked_directories_are_entered(copy, tmp_path):
    """The published layout, its folder of tables a link."""
    directory = copy()
    outside = tmp_path / "tables"
    outside.mkdir()
    for path in directory.glob("layers_*"):
        path.rename(outside / path.name)
    (directory / "engram_int8").symlink_to(outside)
    (outside / "loop").symlink_to(directory)
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    moved = {key: f"engram_int8/{file}" if file.startswith("layers_") else file for key, file in weight_map.items()}
    edit_json(directory / INDEX, lambda index: index.update(weight_map=moved))
    assert failed(directory) == {}
    manifest = tmp_path / "sums"
    assert main(["verify", str(directory), "--write-manifest", str(manifest)]) == 0
    assert manifest.read_text().count("engram_int8/layers_") == 4
    edit_tensors(outside / "layers_1_engram_embed.weight.safetensors", lambda t: next(iter(t.values())).neg_())
    (outside / "gone").symlink_to("nowhere")
    report = verify(directory, check_manifest=manifest)
    failures = {finding.check: finding.detail for finding in report.findings if finding.verdict == "FAIL"}
    assert "dangling link engram_int8/gone" in failures["links"]
    assert failures["manifest"] == "engram_int8/layers_1_engram_embed.weight.safetensors has changed"


def test_structure(copy):
    directory = copy()
    edit_json(directory / INDEX, lambda index: index["weight_map"].pop("norm.weight"))
    report = verify(directory)
    assert [f.check for f in report.findings if f.verdict == "FAIL"] == ["structure"]
    skipped = [f.check for f in report.findings if f.verdict == "SKIP"]
    assert skipped == ["files", "index", "constants", "config", "values", "numbers"]


@pytest.mark.parametrize(
    "header", [b'{"__metadata__": {"a": 1}}', b'{"__metadata__": 5}', "{}".encode("utf-16"), b'{"a": NaN}']
)
def test_headers_that_the_library_refuses(copy, header):
    directory = copy()
    path = directory / "layers_1_engram_embed.scale.safetensors"
    path.unlink()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert "its safetensors header is damaged" in failed(directory)["structure"]


def test_a_weight_file_too_many(copy, converted):
    directory = copy()
    shutil.copy(directory / SHARD, directory / "quant_model_weights-00002-of-00002.safetensors")
    assert (
        "00002-of-00002.safetensors is not in the index; a loader that takes every file" in failed(directory)["files"]
    )


def test_a_tensor_in_two_files(copy):
    directory = copy()
    table = directory / "layers_1_engram_embed.scale.safetensors"
    edit_tensors(table, lambda data: data.update({"norm.weight": torch.ones(256)}))
    assert failed(directory)["files"] == f"norm.weight lies in {table.name}, the index says {SHARD}"


def test_index(copy):
    directory = copy()
    edit_json(directory / INDEX, lambda index: index["metadata"].update(total_size=5))
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    detail = failed(directory)["index"]
    assert "total_size = 5, the tensors have" in detail
    assert "model.safetensors.index.json lies beside" in detail


def test_labels(copy):
    directory = copy()
    edit_json(directory / DESCRIPTION, lambda d: d.update({"layers.0.attn.old.weight": "FLOAT"}))
    assert failed(directory)["labels"] == "layers.0.attn.old.weight is labelled, but is no tensor"


def test_a_table_of_a_size_that_no_hash_addresses(source):
    """One row too many, in the table as in the config: only recomputing finds it."""
    rows = json.loads((source / "config.json").read_text())["text_config"]["engram_num_embeddings"]
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]

    def grow(data: dict[str, torch.Tensor]) -> None:
        for part in ("weight", "scale"):
            key = f"layers.1.engram.embed.{part}"
            raw = data[key].view(torch.uint8)
            data[key] = torch.cat((raw, raw[:1])).view(data[key].dtype)

    edit_tensors(source / weight_map["layers.1.engram.embed.weight"], grow)
    change = {"engram_num_embeddings": [rows[0] + 1, rows[1]]}
    edit_json(source / "config.json", lambda config: config["text_config"].update(change))
    detail = failed(source)["constants"]
    assert detail == f"layer 1: engram_num_embeddings = {rows[0] + 1}, its primes sum up to {rows[0]}"


def test_a_tokenizer_of_another_model(source):
    size = json.loads((source / "config.json").read_text())["text_config"]["engram_compressed_vocab_size"]
    change = {"engram_compressed_vocab_size": size - 1}
    edit_json(source / "config.json", lambda config: config["text_config"].update(change))
    assert f"= {size - 1}, the tokenizer has {size} distinct normalised tokens" in failed(source)["constants"]
    (source / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in failed(source)["constants"]


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (
            lambda c: c["text_config"].update(max_position_embeddings=10**7),
            "max_position_embeddings = 10000000, YaRN",
        ),
        (lambda c: c.update(compression_config={}), "config.json: compression_config belongs to another tool"),
        (lambda c: c.update(auto_map={"AutoModel": "x"}), "auto_map belongs to another tool"),
        (
            lambda c: c["text_config"].update(quantization_config={}),
            "text_config: has a quantization_config of its own",
        ),
        (lambda c: c.update(eos_token_id=99999), "eos_token_id = 99999 is outside the vocabulary"),
        (lambda c: c.update(dtype="float16"), "dtype = 'float16', expected 'bfloat16'"),
        (lambda c: c["quantization_config"].update(weight_block_size=[32, 32]), "quantization_config = {"),
        (lambda c: c.pop("engram_rotation_config"), "engram_rotation_config = None, expected"),
        (lambda c: c["engram_rotation_config"].update(runtime_delta_rotation=True), "engram_rotation_config = {"),
    ],
)
def test_config(copy, change, detail):
    directory = copy()
    edit_json(directory / "config.json", change)
    assert detail in failed(directory)["config"]


def test_a_list_of_end_tokens_is_fine(copy):
    directory = copy()
    edit_json(directory / "config.json", lambda c: c.update(eos_token_id=[1, 2]))
    assert failed(directory) == {}


def test_leftover_files(copy):
    directory = copy()
    (directory / "hf_quant_config.json").write_text("{}")
    (directory / "generation_config.json").unlink()
    detail = failed(directory)["config"]
    assert "hf_quant_config.json belongs to another quantiser" in detail
    assert "generation_config.json is missing" in detail


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "[]", "{", "\x00"])
def test_side_files_that_are_damaged(copy, name, content):
    directory = copy()
    (directory / name).unlink()
    (directory / name).write_text(content)
    assert name in failed(directory)["config"]


@pytest.mark.parametrize(
    ("name", "change", "check"),
    [
        (INDEX, lambda i: i.update(metadata=[1]), "index"),
        (DESCRIPTION, lambda d: d.update(model_quant_type=[]), "structure"),
        (DESCRIPTION, lambda d: d.update(optional={"quarot": None}), "rotation"),
        (DESCRIPTION, lambda d: d["optional"]["quarot"].update(rotation_map=[]), "rotation"),
        ("config.json", lambda c: c["text_config"].update(engram_vocab_size=10**30), "constants"),
        ("config.json", lambda c: c["text_config"]["rope_scaling"].update(factor=10**400), "refused"),
        ("config.json", lambda c: c["text_config"].update(rms_norm_eps=10**400), "refused"),
    ],
)
def test_contents_of_a_wrong_type(copy, name, change, check):
    directory = copy()
    edit_json(directory / name, change)
    if check == "refused":
        with pytest.raises(ConfigError, match="finite number"):
            verify(directory)
    else:
        assert check in failed(directory)


@pytest.mark.parametrize(
    ("weights", "damage", "detail"),
    [
        ("w8a8", lambda d: (d / "optional/quarot.safetensors").unlink(), "holds no global_rotation F32 [256, 256]"),
        ("w8a8", lambda d: edit_json(d / DESCRIPTION, lambda x: x.pop("optional")), "names rotation file None"),
        ("w8a8", lambda d: rotation_file(d, lambda r: r[:32, :32].mul_(1.1)), "its block is not orthogonal"),
        (
            "w8a8-quarot",
            lambda d: rotation_file(d, lambda r: r[64:96].neg_()),
            "rows 64 to 96 do not repeat the first block",
        ),
        (
            "w8a8-quarot",
            lambda d: edit_tensors(d / SHARD, lambda t: t["layers.2.ffn_norm.weight"].mul_(1.01)),
            "layers.2.ffn_norm.weight is not all ones",
        ),
        (
            "w8a8-quarot",
            lambda d: edit_tensors(d / SHARD, lambda t: t.update({"mtp.0.embed.weight": t["embed.weight"].clone()})),
            "mtp.0.embed.weight is not embed.weight before its rotation",
        ),
        (
            "w8a8",
            lambda d: edit_tensors(d / SHARD, lambda t: t["mtp.2.head.weight"][3].mul_(2)),
            "mtp.2.head.weight is not head.weight",
        ),
    ],
)
def test_rotation(copy, weights, damage, detail):
    directory = copy(weights)
    damage(directory)
    assert detail in failed(directory)["rotation"]


def test_norms_of_ones_without_a_rotation(copy):
    directory = copy("w8a8-quarot")
    rotation_file(directory, lambda matrix: matrix.copy_(torch.eye(256)))
    assert "all norm weights are ones, as after a rotation" in failed(directory)["rotation"]
