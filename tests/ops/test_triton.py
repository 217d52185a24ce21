"""The Triton kernels beside the look-up's, in Triton's own interpreter: equal to the references in float32."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import torch
from vllm_ascend_dsv41 import ops
from vllm_ascend_dsv41.ops import compare, compressor_triton, gate_triton, latents_triton, ngrams_triton
from vllm_ascend_dsv41.ops.examples import examples

KERNELS = {
    "engram_inject": gate_triton.engram_inject_npu,
    "ngram_rows": ngrams_triton.ngram_rows_npu,
    "pool_open_groups": compressor_triton.pool_open_groups_npu,
    "store_compressed": latents_triton.store_compressed_npu,
    "store_latents": latents_triton.store_latents_npu,
}
seen = []
for seed in range(3):
    for example in examples(seed, "cpu", torch.float32):
        if example.operator not in KERNELS:
            continue
        operator = getattr(ops, example.operator)
        operator.register("triton")(KERNELS[example.operator])
        found = compare._run(operator, "triton", example)
        wanted = compare._run(operator, "reference", example)
        for one, other in zip(found, wanted, strict=True):
            error, bound = compare._deviation(one, other)[1], compare._bound(operator, other, torch.float32)
            assert error <= bound, (example.operator, example.title, seed, error, bound)
        seen.append(example.operator)
assert set(seen) == set(KERNELS), seen
print(len(seen))
"""


def test_equal_to_the_references_in_float32():
    """The interpreter truncates to BF16, so only float32 is compared here; BF16 on the emulated NPU."""
    variables = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 50
