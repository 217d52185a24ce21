"""`dsv41 selftest --device npu` on the emulated device: what a user of hardware runs first."""

import json

import pytest

from vllm_ascend_dsv41.cli import main

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(fresh=True)]


def test_selftest_of_the_device(capsys, monkeypatch):
    monkeypatch.delenv("EMULATED_TRITON")  # operators and the tiny model by the interpreted kernels
    assert main(["selftest", "--device", "npu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len({line["operator"] for line in said["operators"]}) >= 22
    assert [check["passed"] for check in said["checks"]] == [True] * 6
    assert main(["selftest", "--device", "npu:7"]) == 1
    assert "--device npu:7: " in capsys.readouterr().err


def test_an_operator_that_is_refused_does_not_hide_the_others(capsys, monkeypatch):
    import torch

    def refuses(*args, **kwargs):
        raise RuntimeError("aclnnSparseFlashMla: head dim 40 is not supported")

    assert main(["selftest", "--device", "npu", "--ops", "rms_norm"]) == 0  # loads the extension
    monkeypatch.setattr(torch.ops._C_ascend, "npu_sparse_flash_mla", refuses)
    capsys.readouterr()
    assert main(["selftest", "--device", "npu", "--ops", "sparse_attention,rms_norm", "--json"]) == 1
    said = json.loads(capsys.readouterr().out.splitlines()[-1])["operators"]
    assert {line["refused"] for line in said if line["operator"] == "sparse_attention"} == {
        "aclnnSparseFlashMla: head dim 40 is not supported"
    }
    assert all(line["passed"] for line in said if line["operator"] == "rms_norm")


def test_a_device_that_does_not_read_host_memory_fails(capsys):
    from emulated_npu import library

    library.inject("aclrtHostRegisterV2", 207001, call=1)
    assert main(["selftest", "--quick", "--device", "npu"]) == 1
    out = capsys.readouterr().out
    assert "the device reads registered host memory    FAILED" in out
    assert "207001" in out
