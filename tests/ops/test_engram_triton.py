"""The Triton kernels of the Engram look-up in Triton's own interpreter, on this machine's memory."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from vllm_ascend_dsv41 import ops
from vllm_ascend_dsv41.ops import engram_triton

torch.manual_seed(0)
reference = ops.engram_lookup.implementations["reference"]
for dim, groups in ((256, 8), (64, 2), (32, 1), (256, 0)):
    codes = torch.randint(-127, 128, (50, dim), dtype=torch.int8) if groups else torch.randn(50, dim).bfloat16()
    scale = torch.rand(50, groups) if groups else None
    starts = [[codes[row:].data_ptr(), scale[row:].data_ptr() if groups else 0] for row in range(0, 50, 16)]
    for tokens in (0, 1, 70):  # none, one program each, blocks of which the last is not full
        ids = torch.randint(-3, 60, (tokens, 3))
        wanted = reference(codes, scale, ids, torch.float32)
        assert torch.equal(engram_triton.lookup_npu(codes, scale, ids, torch.float32), wanted), (dim, groups, tokens)
        mapped = engram_triton.lookup_mapped_npu(torch.tensor(starts), ids, 50, 16, dim, groups, torch.float32)
        assert torch.equal(mapped, wanted), (dim, groups, tokens)
print("equal")
"""


def test_equal_to_the_reference_in_float32():
    """The interpreter truncates to BF16, so only float32 is compared here; BF16 on the emulated NPU."""
    variables = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=variables, check=False)
    assert done.stdout == "equal\n", done.stderr[-3000:]
