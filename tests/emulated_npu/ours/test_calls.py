"""What our path calls: the operators of torch_npu, of vllm-ascend's extension and our Triton kernels in a prefill step,
a decode step and a draft, with dtypes, shapes, strides, formats and numbers. A change shows as a difference of lines.

After a change that is meant: DSV41_WRITE_CALLS=1 scripts/test.sh -m long tests/emulated_npu/ours/test_calls.py
"""

import os
from pathlib import Path

import pytest

from emulated_npu import recorder
from emulated_npu.ours.trace import run

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(fresh=True)]
CALLS = Path(__file__).parent / "calls"
STEPS = {"prefill": 0, "draft": 1, "decode": 2}


def test_calls_are_the_recorded_ones(converted, tmp_path):
    traced = run(converted("a", "w8a8"), "a", (17,), tmp_path / "npu", drafts=True, record=True)
    found = {}
    for name, number in STEPS.items():
        lines = traced.calls[number]["lines"]
        found[name] = [line for line in lines if line.startswith(("aclnn aclnn", "_C_ascend", "triton "))]
        assert len(found[name]) > 20
    if os.environ.get("DSV41_WRITE_CALLS"):
        CALLS.mkdir(exist_ok=True)
        for name, lines in found.items():
            (CALLS / f"{name}.txt").write_text("\n".join(lines) + "\n")
    for name, lines in found.items():
        golden = (CALLS / f"{name}.txt").read_text().splitlines()
        assert not recorder.difference(golden, lines), f"{name}:\n{recorder.difference(golden, lines)[:8000]}"
