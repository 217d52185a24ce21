"""What ctypes is told about CANN's functions, against the headers inside the torch_npu wheel."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from vllm_ascend_dsv41.engram import acl

pytestmark = pytest.mark.long
TYPES = {
    ctypes.c_char_p: "char *",
    ctypes.c_void_p: "void *",
    ctypes.c_size_t: "size_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.POINTER(ctypes.c_void_p): "void **",
    ctypes.POINTER(ctypes.c_int32): "int32_t *",
}
CODES = {
    "ACL_ERROR_RT_PARAM_INVALID": 107000,
    "ACL_ERROR_RT_CONTEXT_NULL": 107002,
    "ACL_ERROR_RT_FEATURE_NOT_SUPPORT": 207000,
    "ACL_ERROR_RT_MEMORY_ALLOCATION": 207001,
    "ACL_ERROR_RT_DRV_INTERNAL_ERROR": 507899,
    "ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED": 507910,
    "ACL_ERROR_HOST_MEMORY_NOT_REGISTERED": 507911,
    "ACL_PKG_VERSION_MAX_SIZE": acl.VERSION_SIZE,
    "ACL_HOST_REG_MAPPED": acl.MAPPED,
    "ACL_HOST_REG_PINNED": acl.PINNED,
}
FUNCTIONS = {**acl.SIGNATURES, acl.VERSION[0]: acl.VERSION[1]}


def compiles(overlay: Path, text: str) -> str:
    """Compiler's complaints about a program that includes acl.h."""
    include = overlay / "python/torch_npu/include/third_party/acl/inc"
    program = f"#include <stddef.h>\n#include <stdint.h>\n#include <acl/acl.h>\n{text}\n"
    command = ["gcc", "-x", "c", "-std=c11", "-Werror", f"-I{include}", "-fsyntax-only", "-"]
    return subprocess.run(command, input=program, capture_output=True, text=True, check=False).stderr


def declaration(name: str, arguments: tuple[type, ...]) -> str:
    parameters = ", ".join(TYPES[argument] for argument in arguments) or "void"
    return f"static aclError (*own_{name})({parameters}) = {name};"


def test_every_function_has_the_type_that_ctypes_is_told(overlay):
    lines = [declaration(name, arguments) for name, arguments in FUNCTIONS.items()]
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in CODES.items()]
    uses = "".join(f"(void)own_{name};" for name in FUNCTIONS)
    assert compiles(overlay, "\n".join([*lines, f"void use(void) {{ {uses} }}"])) == ""


def test_a_wrong_type_does_not_compile(overlay):
    wrong = (*acl.SIGNATURES["aclrtMallocHost"], ctypes.c_uint32)  # as vllm-ascend 0.30.0rc2 binds it
    assert "incompatible pointer type" in compiles(overlay, declaration("aclrtMallocHost", wrong))


def test_every_code_with_an_explanation_is_one_of_the_runtime(overlay):
    assert set(acl.MEANING) - set(CODES.values()) == {107017}  # seen on hardware, not in the headers
