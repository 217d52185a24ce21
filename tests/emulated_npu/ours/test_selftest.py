"""`dsv41 selftest --device npu` on the emulated device: what a user of hardware runs first."""

import json

import pytest

from vllm_ascend_dsv41.cli import main

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(fresh=True)]


def test_selftest_of_the_device(capsys):
    assert main(["selftest", "--device", "npu", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len({line["operator"] for line in said["operators"]}) >= 22
    assert [check["passed"] for check in said["checks"]] == [True] * 4
    assert main(["selftest", "--device", "npu:7"]) == 1
    assert "--device npu:7: " in capsys.readouterr().err


def test_a_device_that_does_not_read_host_memory_fails(capsys):
    from emulated_npu import library

    library.inject("aclrtHostRegisterV2", 207001, call=1)
    assert main(["selftest", "--device", "npu"]) == 1
    out = capsys.readouterr().out
    assert "the device reads registered host memory    FAILED" in out
    assert "207001" in out
