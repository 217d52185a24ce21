"""The command line, without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.deploy import serve as serve_module
from vllm_ascend_dsv41.deploy.serve import option_value, plugin_names, preflight
from vllm_ascend_dsv41.quant import CheckpointError, Layout, open_checkpoint


@pytest.mark.parametrize("weights", ["w8a8", "bf16"])
def test_quantize(official, tmp_path, capsys, weights):
    target = tmp_path / "out"
    assert main(["quantize", str(official("a")), str(target), "--weights", weights, "--shard-size", "1MiB"]) == 0
    assert "complete" in capsys.readouterr().out
    checkpoint = open_checkpoint(target)
    assert checkpoint.layout is Layout.ASCEND
    assert checkpoint.weights is not None
    assert checkpoint.weights.value == weights


@pytest.mark.parametrize("size", ["0", "-1GiB", "4GB", "many", ""])
def test_bad_shard_size(size, capsys):
    with pytest.raises(SystemExit) as status:
        main(["quantize", "a", "b", f"--shard-size={size}"])
    assert status.value.code == 2
    assert "is not a size; write for example 4GiB" in capsys.readouterr().err


def test_target_below_a_missing_directory(official, tmp_path, capsys):
    assert main(["quantize", str(official("a")), str(tmp_path / "no" / "out")]) == 1
    assert "no such directory; create it first" in capsys.readouterr().err


def test_selftest(capsys):
    assert main(["selftest", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "sparse_attention" in out
    assert "0 failed" in out


def test_selftest_of_some_operators(capsys):
    assert main(["selftest", "--ops", "rms_norm,route", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {line["operator"] for line in said["operators"]} == {"rms_norm"}  # route has its reference alone here
    assert all(line["passed"] for line in said["operators"])
    assert main(["selftest", "--ops", "rms_norm,softmax"]) == 1
    assert "--ops softmax: no such operator; there are apply_rope" in capsys.readouterr().err
    assert main(["selftest", "--device", "npu"]) == 1
    assert "--device npu: " in capsys.readouterr().err


def test_selftest_fails_when_an_operator_is_wrong(monkeypatch, capsys):
    from vllm_ascend_dsv41 import ops

    monkeypatch.setitem(ops.rms_norm.implementations, "cpu", lambda x, weight, eps: x)
    assert main(["selftest", "--quick"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["m", "--quantization", "ascend"], "ascend"),
        (["m", "--quantization=fp8"], "fp8"),
        (["m", "--quantization", "fp8", "--quantization", "ascend"], "ascend"),
        (["m", "--quantization"], None),
        (["m"], None),
    ],
)
def test_option_value(arguments, value):
    assert option_value(arguments, "--quantization") == value


def test_preflight_looks_at_local_checkpoints_only(official, converted):
    preflight(["some-organisation/some-model"])
    preflight([str(official("a")), "--quantization", "fp8"])
    preflight([str(converted("a", "w8a8")), "--quantization", "ascend"])
    preflight(["--model", str(converted("a", "w8a8"))])
    with pytest.raises(CheckpointError, match="official checkpoint"):
        preflight(["--model", str(official("a"))])


def test_plugins_of_other_platforms_are_left_out(monkeypatch):
    def entry(name: str, value: str):
        return type("Entry", (), {"name": name, "value": value})

    found = [
        entry("dsv41", "vllm_ascend_dsv41:register"),
        entry("ascend_model_loader", "vllm_ascend:register_model_loader"),
        entry("ascend_connector", "vllm_ascend.kv:register"),
        entry("other", "vllm_other:register"),
    ]
    monkeypatch.setattr(serve_module, "entry_points", lambda group: found)
    assert plugin_names() == "dsv41,ascend_model_loader,ascend_connector"


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, vllm_ascend_dsv41, vllm_ascend_dsv41.cli; print('torch' in sys.modules, 'vllm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
