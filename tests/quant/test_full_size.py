"""The released sizes without the released data: the whole plan, and offsets beyond 32 bits in sparse files."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.quant import Weights, inventory, open_checkpoint
from vllm_ascend_dsv41.quant.convert import _locations, _make_files
from vllm_ascend_dsv41.quant.plan import make_plan
from vllm_ascend_dsv41.quant.safetensors_writer import header
from vllm_ascend_dsv41.quant.work import Worker
from vllm_ascend_dsv41.verify.numbers import Reader

from .test_inventory import RELEASED

CONFIG = {"model_type": "deepseek_v41", **RELEASED}


@pytest.fixture
def released(tmp_path):
    """A directory that holds nothing but the released config."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    return source


def test_dry_run_lists_everything(released, tmp_path, capsys):
    """Counts of spec sections 2 and 5.3, from the config alone."""
    status = main(["quantize", str(released), str(tmp_path / "out"), "--dry-run", "--json"])
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert len(report["input"]["tensors"]) == 96_085
    assert report["input"]["bytes"] == 510_286_023_000
    assert {(row["section"], row["label"]): row["tensors"] for row in report["output"]["counts"]} == {
        ("trunk", "W8A8_DYNAMIC"): 138_984,
        ("trunk", "FLOAT"): 670,
        ("draft", "W8A8_DYNAMIC"): 3_510,
        ("draft", "FLOAT"): 56,
        ("vision", "FLOAT"): 266,
        ("engram", "FLOAT"): 10,
    }
    output = report["output"]
    assert output["bytes"] == sum(tensor["bytes"] for tensor in output["tensors"]) == 800_093_612_936
    assert len({tensor["name"] for tensor in output["tensors"]}) == 143_496
    sizes = {file["name"]: file["bytes"] for file in output["files"]}
    assert max(size for name, size in sizes.items() if name.startswith("quant")) < (4 << 30) + (1 << 20)
    tables = {tensor["name"]: tensor for tensor in output["tensors"] if ".engram.embed." in tensor["name"]}
    assert tables["layers.1.engram.embed.weight"]["bytes"] == 98_305_579_008
    assert tables["layers.14.engram.embed.scale"]["bytes"] == 12_288_533_824
    assert Counter(tensor["file"] for tensor in output["tensors"]) == {
        file["name"]: file["tensors"] for file in output["files"]
    }
    assert report["estimate"]["core_seconds"] > 1
    assert status == (report["room"]["free"] < report["room"]["needed"])
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_dry_run_without_room(released, tmp_path, capsys, monkeypatch):
    from vllm_ascend_dsv41.quant import dry_run

    monkeypatch.setattr(dry_run.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5 << 30}))
    assert main(["quantize", str(released), str(tmp_path / "out"), "--dry-run"]) == 1
    captured = capsys.readouterr()
    assert "reads      96,085 tensors      510,286,023,000 bytes" in captured.out
    assert "5120 MiB free, the conversion needs 763181 MiB" in captured.err
    assert main(["quantize", str(released), str(tmp_path / "no" / "out"), "--dry-run"]) == 1
    assert "no such directory; create it first" in capsys.readouterr().err


def test_dry_run_of_a_damaged_source(official, tmp_path, capsys):
    """Where there are weights, they are checked as the conversion checks them."""
    import shutil

    shutil.copytree(official("a"), tmp_path / "source")
    (tmp_path / "source" / "model-00003-of-00016.safetensors").unlink()
    assert main(["quantize", str(tmp_path / "source"), str(tmp_path / "out"), "--dry-run"]) == 1
    assert "files that the index names are missing: model-00003" in capsys.readouterr().err


def test_every_byte_of_the_plan_is_written_once():
    """Steps cover each output tensor from its first row to its last without gap or overlap."""
    plan = make_plan(CONFIG, Weights.W8A8, rotate=True)
    rows: dict[str, list[tuple[int, int]]] = {}
    for step in plan.steps:
        assert step.bytes <= 64 << 20
        for piece in step.pieces:
            for output in piece.outputs:
                rows.setdefault(output.stored.key, []).append((piece.begin, piece.end))
    for file in plan.files:
        for stored in file.tensors:
            spans = rows.pop(stored.key)
            assert spans[0][0] == 0
            assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
            assert spans[-1][1] == (stored.shape[0] if len(stored.shape) > 1 else 1)
    assert not rows


ROWS = 2**31 + 1000  # of the Engram table: half a terabyte


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """Real shapes of a layer with Engram and of a draft block, two experts each, in files that are nearly all hole."""
    config = copy.deepcopy(CONFIG)
    config["text_config"].update(
        num_hidden_layers=2,
        n_routed_experts=2,
        num_experts_per_tok=1,
        dspark_n_routed_experts=2,
        dspark_num_experts_per_tok=1,
        compress_ratios=[2, 1, 0],
        kv_source_layer_ids=[0, 1],
        index_source_layer_ids=[0, 1],
        candidate_source_layer_id=1,
        engram_layer_ids=[1],
        engram_num_embeddings=[ROWS],
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=[1],
    )
    config["vision_config"] = {"num_hidden_layers": 0}
    root = tmp_path_factory.mktemp("sparse")
    random = np.random.default_rng(0)
    files: dict[str, list] = {}
    for spec in inventory(config):
        name = "engram" if ".engram." in spec.name else spec.name.split(".")[0]
        files.setdefault(f"{name}.safetensors", []).extend(spec.official())
    for name, tensors in files.items():
        begin, offsets, size = header(tensors)
        with (root / name).open("wb") as file:
            file.write(begin)
            file.truncate(size)
            for stored, offset in zip(tensors, offsets, strict=True):
                for first, data in samples(stored, random):
                    file.seek(offset + first)
                    file.write(data)
    weight_map = {stored.key: name for name, tensors in files.items() for stored in tensors}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (root / "config.json").write_text(json.dumps(config))
    return root


def samples(stored, random):
    """Bytes at the ends of a tensor, and around row 2 ** 31 where it has that many."""
    row = stored.bytes // stored.shape[0]
    count = min(32 * row, stored.bytes)
    for first in sorted({0, stored.bytes - count, *([2**31 * row - 16 * row] if stored.shape[0] > 2**31 else [])}):
        if stored.dtype == "BF16":
            data = (random.integers(0x3C00, 0x3F00, count // 2, dtype=np.uint16)).tobytes()
        elif stored.dtype == "F32":
            data = random.standard_normal(count // 4, dtype=np.float32).tobytes()
        elif stored.dtype == "F8_E8M0":
            data = random.integers(118, 124, count, dtype=np.uint8).tobytes()
        else:
            data = (
                random.integers(0, 0x7F, count, dtype=np.uint8) | random.integers(0, 2, count, dtype=np.uint8) << 7
            ).tobytes()
        yield first, data


def test_offsets_beyond_32_bits(sparse, tmp_path):
    checkpoint = open_checkpoint(sparse)
    plan = make_plan(checkpoint.config, Weights.W8A8)
    assert max(file.size for file in plan.files) > 2**39
    journal: Any = type("NothingDone", (), {"done": set()})()
    _make_files(plan, tmp_path / "out", journal)
    worker, ran = Worker(sparse, tmp_path / "out", Weights.W8A8), 0
    wanted = {"layers.1.attn.wq_b.weight", "layers.1.ffn.experts.1.w2.weight", "mtp.0.ffn.experts.1.w1.weight"}
    wanted |= {"mtp.0.attn.wo_b.weight", "layers.1.engram.wkv.weight"}
    for step in plan.steps:
        names = {piece.spec.name for piece in step.pieces}
        table = any(
            piece.spec.name == "layers.1.engram.embed.weight"
            and (piece.begin <= 2**31 < piece.end or piece.end == ROWS)
            for piece in step.pieces
        )
        if table or names & wanted:
            worker.run(step, _locations(step, checkpoint))
            ran += 1
    assert 4 <= ran < len(plan.steps) / 100
    files = {stored.key: tmp_path / "out" / file.name for file in plan.files for stored in file.tensors}
    source, specs = Reader(checkpoint), {spec.name: spec for spec in checkpoint.tensors}
    for key in sorted(wanted):
        weight = source.source(specs[key], 0, specs[key].shape[0])
        assert weight.abs().max() > 0
        if specs[key].quantized:
            codes, scale = (read(files[name], name) for name in (key, f"{key}_scale"))
            assert ((codes.float() * scale - weight).abs() <= scale * 0.5001).all(), key
        else:
            assert torch.equal(read(files[key], key).float(), weight)
    key = "layers.1.engram.embed"
    for row in (2**31 - 17, *range(2**31 - 16, 2**31 + 16), ROWS - 2, ROWS - 1):
        values = source.source(specs[f"{key}.weight"], row, row + 1)
        assert bool(values.any()) == (row > 2**31 - 17)
        codes, scale = (
            read_row(files[f"{key}.{part}"], row, columns) for part, columns in (("weight", 256), ("scale", 32))
        )
        step = torch.from_numpy(scale.view(np.float32).copy()).repeat_interleave(32)
        assert ((torch.from_numpy(codes.view(np.int8).copy()).float() * step - values).abs() <= step / 2).all()


def read(path: Path, key: str) -> torch.Tensor:
    """A tensor."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key)


def read_row(path: Path, row: int, row_bytes: int) -> np.ndarray:
    """Bytes of one row of a file with one tensor, too large to be mapped."""
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little") + row * row_bytes)
        return np.frombuffer(file.read(row_bytes), np.uint8)
