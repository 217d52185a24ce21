"""The Engram kernels through Triton-Ascend and bishengir-compile, to where CANN would make the binary.

What passes is well formed for the chip and fits its unified buffer. It was not run, and CANN has not seen it.
"""

from __future__ import annotations

import os
import re

import pytest

from vllm_ascend_dsv41 import ops

from . import ascend_compiler

pytestmark = pytest.mark.long
SOURCE = ascend_compiler.Path(ops.__file__).with_name("engram_triton.py")
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


def test_what_does_not_fit_the_unified_buffer_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="ub overflow, requires"):
        compiled("lookup_mapped", 8192, "Ascend910B3", tmp_path, dim=8192 * 32)
