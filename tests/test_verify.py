"""`dsv41 verify`: what holds passes, and each kind of damage is found by the check that is made for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.quant import CheckpointError
from vllm_ascend_dsv41.verify import verify

INDEX = "quant_model_weights.safetensors.index.json"
DESCRIPTION = "quant_model_description.json"
SHARD = "quant_model_weights-00001-of-00001.safetensors"


@pytest.fixture
def copy(converted, tmp_path):
    """A copy of a conversion to damage; unchanged files are links."""

    def make(weights: str = "w8a8") -> Path:
        target = tmp_path / f"copy-{weights}"
        shutil.copytree(converted("a", weights), target, copy_function=lambda a, b: Path(b).hardlink_to(a))
        return target

    return make


def edit_json(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.unlink()
    path.write_text(json.dumps(value))


def edit_tensors(path: Path, change) -> None:
    data = load_file(path)
    change(data)
    path.unlink()
    save_file(data, path)


def failed(directory: Path, against: Path | None = None, sample: int | None = None) -> dict[str, str]:
    """Check -> detail of everything that failed."""
    report = verify(directory, against, sample)
    assert report.holds == (not any(finding.verdict == "FAIL" for finding in report.findings))
    return {finding.check: finding.detail for finding in report.findings if finding.verdict == "FAIL"}


@pytest.mark.parametrize("weights", ["w8a8", "bf16", "w8a8-quarot", "bf16-quarot"])
@pytest.mark.parametrize("sample", [None, 1, 2, 5])
def test_conversions_hold(official, converted, weights, sample):
    report = verify(converted("a", weights), official("a"), sample)
    assert report.holds, report.findings
    assert {finding.verdict for finding in report.findings} == {"PASS"}
    assert {finding.check for finding in report.findings} == {
        "links", "structure", "files", "index", "constants", "config", "labels", "rotation", "numbers",
    }  # fmt: skip
    assert len(report.tensors) == 758
    largest = max(tensor.relative_error for tensor in report.tensors)
    assert largest < (0.02 if "w8a8" in weights else 0.003)
    if weights == "bf16":
        assert largest == 0


def test_an_official_checkpoint(official):
    report = verify(official("a"))
    assert report.holds
    assert {finding.check for finding in report.findings} == {
        "links",
        "structure",
        "files",
        "index",
        "constants",
        "config",
    }


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"not a checkpoint, config\.json is missing"):
        verify(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        verify(tmp_path / "nowhere")


def test_links(copy):
    directory = copy()
    (directory / "old.safetensors").symlink_to("/nowhere/blob")
    assert failed(directory)["links"] == "dangling link old.safetensors -> /nowhere/blob"


def test_structure(copy):
    directory = copy()
    edit_json(directory / INDEX, lambda index: index["weight_map"].pop("norm.weight"))
    report = verify(directory)
    assert [f.check for f in report.findings if f.verdict == "FAIL"] == ["structure"]
    assert [f.check for f in report.findings if f.verdict == "SKIP"] == [
        "files",
        "index",
        "constants",
        "config",
        "numbers",
    ]


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


@pytest.fixture
def source(official, tmp_path):
    """A copy of the official checkpoint to damage."""
    shutil.copytree(official("a"), tmp_path / "source", copy_function=lambda a, b: Path(b).hardlink_to(a))
    return tmp_path / "source"


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
            "max_position_embeddings = 10000000, YaRN reaches",
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


def test_leftover_files(copy):
    directory = copy()
    (directory / "hf_quant_config.json").write_text("{}")
    (directory / "generation_config.json").unlink()
    detail = failed(directory)["config"]
    assert "hf_quant_config.json belongs to another quantiser" in detail
    assert "generation_config.json is missing" in detail


def test_labels(copy):
    directory = copy()
    edit_json(directory / DESCRIPTION, lambda d: d.update({"layers.0.attn.old.weight": "FLOAT"}))
    assert failed(directory)["labels"] == "layers.0.attn.old.weight is labelled, but is no tensor"


def rotation_file(directory: Path, change) -> None:
    edit_tensors(directory / "optional/quarot.safetensors", lambda data: change(data["global_rotation"]))


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


@pytest.mark.parametrize(
    ("weights", "key", "damage", "detail"),
    [
        ("w8a8", "layers.3.attn.wq_a.weight_scale", lambda t: t.mul_(1.02), "layers.3.attn.wq_a.weight: row 0, column"),
        (
            "w8a8",
            "layers.3.ffn.experts.5.w1.weight",
            lambda t: t[7, 9].add_(3),
            "experts.5.w1.weight: row 7, column 9 is",
        ),
        ("w8a8", "layers.3.ffn.experts.5.w1.weight", lambda t: t[8, 3].fill_(-128), "hold code -128"),
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
    assert set(found) <= {"numbers", "rotation"}
    assert detail in found["numbers"]
    if not key.startswith("mtp.2.head"):
        assert set(found) == {"numbers"}


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
    detail = failed(converted("a", "w8a8"), official("b"))["numbers"]
    assert detail.startswith("text_config differs from the source's in")


def test_command(official, converted, capsys):
    assert main(["verify", str(converted("a", "w8a8")), "--against", str(official("a")), "--sample", "1"]) == 0
    out = capsys.readouterr().out
    assert "everything holds" in out
    assert "expert" in out
    assert main(["verify", str(converted("a", "w8a8")), "--against", str(official("b")), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] is False
    assert main(["verify", str(converted("a", "w8a8")), "--against", str(converted("a", "bf16"))]) == 1
    assert "already in the Ascend layout; give the official checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["verify", "x", "--sample", "0"])


def test_manifest(copy, tmp_path, capsys):
    import subprocess

    directory, manifest = copy(), tmp_path / "SHA256SUMS"
    assert main(["verify", str(directory), "--write-manifest", str(manifest)]) == 0
    subprocess.run(["sha256sum", "--check", "--quiet", str(manifest)], cwd=directory, check=True)
    assert main(["verify", str(directory), "--check-manifest", str(manifest)]) == 0
    assert main(["verify", str(directory), "--write-manifest", str(manifest)]) == 1
    assert "exists already; remove it, or check against it" in capsys.readouterr().err
    assert main(["verify", str(directory), "--write-manifest", str(directory / "SHA256SUMS")]) == 1
    assert "lies inside the checkpoint" in capsys.readouterr().err
    edit_json(directory / "generation_config.json", lambda c: c.update(temperature=0.5))
    (directory / "new").touch()
    (directory / "tokenizer_config.json").rename(directory / "renamed")
    assert main(["verify", str(directory), "--check-manifest", str(manifest)]) == 1
    out = capsys.readouterr().out
    for problem in (
        "tokenizer_config.json is missing",
        "new is not in the manifest",
        "generation_config.json has changed",
    ):
        assert problem in out
    manifest.write_text("no manifest\n")
    assert main(["verify", str(directory), "--check-manifest", str(manifest)]) == 1
    assert "line 1 is not of the form that sha256sum writes" in capsys.readouterr().err
