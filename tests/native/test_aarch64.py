"""The kernels compiled for aarch64 and run by qemu, and compiled for x86_64 by Clang: bit by bit as GCC's here."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vllm_ascend_dsv41 import native

from . import cross

pytestmark = pytest.mark.long
FUNCTIONS = [
    "int8_from_mxfp4",
    "int8_from_fp8_tiles",
    "engram_int8_from_fp8",
    "float_from_mxfp4",
    "float_from_fp8",
    "int8_from_float",
    "bf16_from_float",
    "float_from_bf16",
    "hadamard",
    "engram_rows",
    "hash_ngrams",
]


@pytest.fixture(scope="module", params=["aarch64-linux-musl", "x86_64-linux-musl"])
def run(request, tmp_path_factory) -> Callable[[bytes], bytes]:
    """Runs the program for a target on bytes."""
    try:
        emulator = cross.prepare()
    except cross.ToolError as error:
        if os.environ.get("AARCH64_REQUIRED"):
            raise
        pytest.skip(str(error))
    program = tmp_path_factory.mktemp("program") / "run_kernels"
    cross.build(request.param, program)
    command = [str(emulator), str(program)] if request.param.startswith("aarch64") else [str(program)]
    if request.param.startswith("aarch64"):
        assert program.read_bytes()[18:20] == b"\xb7\x00"  # EM_AARCH64: it is what it is said to be

    def call(data: bytes) -> bytes:
        return subprocess.run(command, input=data, capture_output=True, check=True, timeout=600).stdout

    return call


def case(number: int, random: np.random.Generator) -> tuple[tuple[int, int, int], list[Any]]:
    """(rows, columns, rows of a tile) and inputs for a function: anything at all, or what a checkpoint may hold."""
    name, wild = FUNCTIONS[number], random.random() < 0.3
    rows, columns = int(random.integers(1, 70)), int(random.integers(1, 9)) * 32
    if name in ("int8_from_fp8_tiles", "float_from_fp8", "int8_from_float", "bf16_from_float", "float_from_bf16"):
        columns = int(random.integers(1, 300))
    tile_rows = 1 if name == "engram_int8_from_fp8" or (name == "float_from_fp8" and random.random() < 0.5) else 32
    if name.endswith("from_float") or name == "hadamard":
        values = random.standard_normal((rows, columns)).astype(np.float32)
        if wild:
            exponents = random.integers(-149, 120, (rows, 1)).astype(np.float64)
            values = (values * 2.0**exponents).astype(np.float32)
        return (rows, columns, 1), [values]
    if name == "engram_rows":
        table, groups = int(random.integers(1, 40)), columns // 32
        scale = np.exp2(random.integers(-149, 127, table * groups).astype(np.float64)).astype(np.float32)
        if wild:
            scale = random.integers(0, 0x7F800000, table * groups, dtype=np.uint32).view(np.float32)
        codes = random.integers(0, 256, table * columns, dtype=np.uint8)
        ids = random.integers(-3, table + 3, rows)
        return (rows, columns, table), [np.concatenate([codes, scale.view(np.uint8)]), ids]
    if name == "hash_ngrams":
        columns = int(random.integers(1, 9)) * 3
        ngrams = random.integers(-1, 99_092, (rows, 4))
        constants = [random.integers(-(2**62), 2**62, 4), random.integers(2, 2**40, columns)]
        return (rows, columns, 1), [ngrams, np.concatenate([*constants, random.integers(0, 2**40, columns)])]
    if name == "float_from_bf16":
        return (rows, columns, 1), [random.integers(0, 0x7F00, (rows, columns), dtype=np.uint16)]
    low, high = (0, 256) if wild else (100, 150)
    mx = "mxfp4" in name
    weight = random.integers(0, 256, (rows, columns // 2 if mx else columns), dtype=np.uint8)
    if not mx and random.random() < 0.9:
        weight[(weight & 0x7F) == 0x7F] ^= 1
    scale_rows = rows if mx else -(-rows // tile_rows)
    return (rows, columns, tile_rows), [
        weight,
        random.integers(low, high, (scale_rows, -(-columns // 32)), dtype=np.uint8),
    ]


def here(number: int, shape: tuple[int, int, int], inputs: list[Any]) -> tuple[int, list[Any]]:
    """The place and the four output buffers of run_kernels.c, from the library that GCC made."""
    name, (rows, columns, tile_rows) = FUNCTIONS[number], shape
    tiles = -(-columns // 32)
    buffers = [np.zeros((rows, columns), np.int8), np.zeros(rows * tiles, np.float32)]
    buffers += [np.zeros((rows, columns), np.float32), np.zeros((rows, columns), np.uint16)]
    codes, scales, values, bits = buffers
    if name == "engram_rows":
        return look_up(inputs, tile_rows, columns, values, bits), buffers
    if name == "hash_ngrams":
        first, primes, offsets = inputs[1][:4], inputs[1][4 : 4 + columns], inputs[1][4 + columns :]
        out = np.zeros((1, rows, columns), np.int64)
        native.hash_ngrams(inputs[0], first[None], primes.reshape(1, 3, -1), offsets[None], 2, out)
        raw = out.view(np.uint8).flatten()
        buffers[0] = raw[: rows * columns]
        values[:] = raw[: values.nbytes].view(np.float32).reshape(values.shape)
        bits[:] = raw[: bits.nbytes].view(np.uint16).reshape(bits.shape)
        return -1, buffers
    if name == "hadamard":
        values[:] = inputs[0]
        return native.hadamard(values), buffers
    if name == "float_from_fp8":
        return native.float_from_fp8(*inputs, tile_rows, values), buffers
    if name == "engram_int8_from_fp8":
        return native.engram_int8_from_fp8(*inputs, codes, scales.reshape(rows, tiles)), buffers
    if name.startswith("int8"):
        return getattr(native, name)(*inputs, codes, scales[:rows]), buffers
    return getattr(native, name)(*inputs, bits if name == "bf16_from_float" else values), buffers


def look_up(inputs: list[Any], table: int, columns: int, values: Any, bits: Any) -> int:
    """As case 9 of run_kernels.c."""
    groups, memory = columns // 32, inputs[0]
    codes, scales = memory.ctypes.data, memory.ctypes.data + table * columns
    starts = [[codes + row * columns, scales + row * groups * 4] for row in range(0, table, 7)]
    for out in (bits, values):
        native.engram_rows(np.array(starts), inputs[1], table, 7, groups, out)
    return -1


@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
def test_equal_to_this_machine(run, number):
    random = np.random.default_rng(number)
    cases = [case(number, random) for _ in range(150)]
    data = b"".join(
        struct.pack("<4q", number, *shape) + b"".join(part.tobytes() for part in inputs) for shape, inputs in cases
    )
    answer, finished = memoryview(run(data)), 0
    for shape, inputs in cases:
        place, buffers = here(number, shape, inputs)
        found, answer = struct.unpack("<q", answer[:8])[0], answer[8:]
        assert found == place
        for buffer in buffers:
            part, answer = answer[: buffer.nbytes], answer[buffer.nbytes :]
            if place < 0:
                assert bytes(part) == buffer.tobytes(), (shape, FUNCTIONS[number])
        finished += place < 0
    assert not answer
    assert finished > 75  # most cases are numbers, not refusals
