"""The Triton kernels through Triton-Ascend and bishengir-compile, to where CANN would make the binary.

What passes is well formed for the chip and fits its unified buffer. It was not run, and CANN has not seen it.
"""

from __future__ import annotations

import os
import re

import pytest

from vllm_ascend_dsv41 import ops

from . import ascend_compiler

pytestmark = pytest.mark.long
OPS = ascend_compiler.Path(ops.__file__).parent
SOURCE = OPS / "engram_triton.py"
CODES = {8: "*i8", 0: "*bf16"}
CHIPS = {"Ascend910B3": 40, "Ascend910_9391": 48}  # Atlas A2, A3: vector cores


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    try:
        ascend_compiler.prepare()
    except ascend_compiler.CompilerError as error:
        if os.environ.get("ASCEND_COMPILER_REQUIRED"):
            raise
        pytest.skip(str(error))


def compiled(kernel: str, groups: int, soc: str, out, dim: int = 256, block: int = 16, rows: str = "i32"):
    """linalg and hivmc's input. ``rows``: Triton takes Python's integers below 2 ** 31 for 32 bits."""
    sizes = {"rows": rows, "tokens": "i32", "columns": "i32"}
    constants = {"DIM": dim, "GROUPS": groups, "BLOCK": block}
    if kernel == "lookup":
        signature = {"codes": CODES[min(groups, 8)], "scales": "*fp32", "ids": "*i64", "out": "*bf16", **sizes}
    else:
        constants = {"CHUNK_ROWS": 1 << 22, **constants}
        signature = {"addresses": "*i64", "ids": "*i64", "out": "*bf16", **sizes}
    linalg = ascend_compiler.lower(SOURCE, kernel, signature, constants, soc, out)
    return linalg, ascend_compiler.compile_linalg(linalg, soc, out)


@pytest.mark.parametrize("soc", CHIPS)
@pytest.mark.parametrize("groups", [8, 0])
@pytest.mark.parametrize("kernel", ["lookup", "lookup_mapped"])
def test_kernels_compile_to_hivmcs_door(tmp_path, kernel, groups, soc):
    for block, rows in ((1, "i32"), (16, "i32"), (16, "i64")):
        linalg, module = compiled(kernel, groups, soc, tmp_path / f"{block}{rows}", block=block, rows=rows)
        assert ("hivm.hir.pointer_cast" in linalg) == (kernel == "lookup_mapped")  # follows addresses of 64 bits
        cores = re.search(r'"VECTOR_CORE_COUNT", (\d+)', module)
        assert cores is not None
        assert int(cores[1]) == CHIPS[soc]
        assert "#hivm.address_space<ub>" in module


BF16, FP32, I8, I32, I64 = "*bf16", "*fp32", "*i8", "*i32", "*i64"
RING = ("tokens", "requests", "table_stride", "ring_stride", "capacity")
#: file, kernel, tensors, numbers, constants: released sizes; of latents TP8, TP1 and the draft's observed rows.
KERNELS = [
    *(
        (
            "latents",
            "latents",
            {"q": BF16, "kv": BF16, "weight": FP32, "cos": FP32, "sin": FP32, "cache": BF16}
            | {"slots": I32 if slots else BF16},
            ("tokens", "kv_stride", "block_stride", "per_block"),
            {"HEADS": heads, "WIDTH": 512, "ROPE": 64, "SLOTS": slots}
            | {"HEAD_PAD": min(max(heads, 1), 16), "PLAIN_PAD": 512, "PAIR_PAD": 32},
        )
        for heads, slots in ((8, True), (64, True), (8, False), (0, True))
    ),
    *(
        (
            "latents",
            "compressed",
            {"latent": BF16, "key": BF16, "weight": FP32, "cos": FP32, "sin": FP32, "row_slots": I32, "key_slots": I32}
            | {"rows": BF16, "keys": I8, "scales": "*fp16"},
            ("tokens", "row_stride", "row_per_block", "key_stride", "key_per_block", "scale_stride"),
            {"WIDTH": 512, "INDEX": 128, "ROPE": 64, "RATIO": ratio, "CODES": True}
            | {"PLAIN_PAD": 512, "INDEX_PAD": 64, "PAIR_PAD": 32},
        )
        for ratio in (1, 2)
    ),
    (
        "gate",
        "inject",
        {"streams": BF16, "kv": BF16, "weight": FP32, "dead": "*i1", "out": BF16},
        ("tokens", "kv_stride"),
        {"HC": 4, "DIM": 5120, "PART": 1024},
    ),
    (
        "ngrams",
        "rows",
        {"ids": I32, "token_map": I64, "lookback": I32, "query_start": I32, "multipliers": I64, "primes": I64}
        | {"offsets": I64, "out": I64},
        ("tokens", "requests", "pad"),
        {"ORDERS": 4, "HEADS": 8, "REQUESTS_PAD": 256},
    ),
    (
        "compressor",
        "pool",
        {"inputs": FP32, "ring": FP32, "table": I32, "query_start": I32, "lengths": I32, "out": FP32},
        RING,
        {"WIDTH": 512, "PAD": 512, "REQUESTS_PAD": 256},
    ),
    (
        "compressor",
        "keep",
        {"inputs": FP32, "ring": FP32, "table": I32, "query_start": I32, "lengths": I32, "slots": I32},
        RING,
        {"WIDTH": 1024, "PAD": 1024, "REQUESTS_PAD": 256},
    ),
]


@pytest.mark.parametrize("soc", CHIPS)
@pytest.mark.parametrize(("file", "kernel", "tensors", "numbers", "constants"), KERNELS)
def test_kernels_around_caches_compile(tmp_path, soc, file, kernel, tensors, numbers, constants):
    signature = {**tensors, **dict.fromkeys(numbers, "i32")}
    if kernel in ("latents", "compressed", "inject"):
        signature["eps"] = "fp32"
    linalg = ascend_compiler.lower(OPS / f"{file}_triton.py", kernel, signature, constants, soc, tmp_path)
    assert "#hivm.address_space<ub>" in ascend_compiler.compile_linalg(linalg, soc, tmp_path)


def test_what_does_not_fit_the_unified_buffer_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="ub overflow, requires"):
        compiled("lookup_mapped", 8192, "Ascend910B3", tmp_path, dim=8192 * 32)
