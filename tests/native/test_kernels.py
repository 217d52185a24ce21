"""The compiled kernels against the clear reference: bit-identical on any input, and refusing the same ones."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_dsv41 import native
from vllm_ascend_dsv41.native import threads as threads_module
from vllm_ascend_dsv41.ops import engram
from vllm_ascend_dsv41.quant import reference, rotation

EXPONENTS = st.one_of(st.integers(100, 150), st.sampled_from([0, 1, 2, 23, 127, 252, 253, 254]), st.integers(0, 255))
KERNELS = [reference, native]


@pytest.fixture(autouse=True, scope="module", params=["widest", "plain"])
def version(request):
    """Every test runs with the version that this processor gets, and with the one for any processor."""
    assert native.available, "the kernels were not built: is gcc there?"
    native.plain_only(request.param == "plain")
    yield
    native.plain_only(False)


def case(draw: Any, shape: tuple[int, int], tiles: tuple[int, int]) -> tuple[Any, Any]:
    """Random bytes and scales: few distinct scales, as in a checkpoint, or any."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    weight = random.integers(0, 256, shape, dtype=np.uint8)
    if draw(st.booleans()):
        weight[random.random(shape) < 0.9] = draw(st.sampled_from([0, 0x80, 1, 0x88]))
    pool = draw(st.lists(EXPONENTS, min_size=1, max_size=6))
    exponents = random.choice(np.array(pool, dtype=np.uint8), tiles)
    return weight, exponents


def outputs(*shapes: tuple[tuple[int, ...], type]) -> list[list[Any]]:
    return [[np.full(shape, 77, dtype) for shape, dtype in shapes] for _ in KERNELS]


def agree(function: str, arguments: tuple[Any, ...], results: list[list[Any]]) -> int:
    """Run both; the results are equal bit by bit, or the same place is refused. Returns the place, or -1."""
    places = [getattr(module, function)(*arguments, *result) for module, result in zip(KERNELS, results, strict=True)]
    assert places[0] == places[1]
    if places[0] < 0:
        for expected, found in zip(*results, strict=True):
            assert expected.tobytes() == found.tobytes()
    return places[0]


@given(st.data(), st.integers(1, 9), st.integers(1, 6))
@settings(max_examples=150, deadline=None)
def test_mxfp4(version, data, rows, groups):
    columns = groups * 32
    weight, exponents = case(data.draw, (rows, columns // 2), (rows, groups))
    agree("int8_from_mxfp4", (weight, exponents), outputs(((rows, columns), np.int8), ((rows,), np.float32)))
    agree("float_from_mxfp4", (weight, exponents), outputs(((rows, columns), np.float32)))


@given(st.data(), st.integers(1, 70), st.integers(1, 100))
@settings(max_examples=150, deadline=None)
def test_fp8_tiles(version, data, rows, columns):
    weight, exponents = case(data.draw, (rows, columns), (-(-rows // 32), -(-columns // 32)))
    if data.draw(st.booleans()):
        weight[(weight & 0x7F) == 0x7F] = 0x7E
    agree("int8_from_fp8_tiles", (weight, exponents), outputs(((rows, columns), np.int8), ((rows,), np.float32)))
    agree("float_from_fp8", (weight, exponents, 32), outputs(((rows, columns), np.float32)))


@given(st.data(), st.integers(1, 20), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_engram_rows(version, data, rows, groups):
    dim = groups * 32
    weight, exponents = case(data.draw, (rows, dim), (rows, groups))
    if data.draw(st.booleans()):
        weight[(weight & 0x7F) == 0x7F] = 0x7E
    agree("engram_int8_from_fp8", (weight, exponents), outputs(((rows, dim), np.int8), ((rows, groups), np.float32)))
    agree("float_from_fp8", (weight, exponents, 1), outputs(((rows, dim), np.float32)))


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 70), st.sampled_from([0, 1, 2]))
@settings(max_examples=150, deadline=None)
def test_float(version, seed, rows, columns, kind):
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, columns)).astype(np.float32)
    if kind == 1:  # any bits: infinities, NaN, subnormals
        values = random.integers(0, 2**32, (rows, columns), dtype=np.uint32).view(np.float32)
    if kind == 2:  # subnormals and zeros
        values = random.integers(0, 2 ** random.integers(1, 24), (rows, columns), dtype=np.uint32).view(np.float32)
        values[:, ::2] *= 0
    agree("int8_from_float", (values,), outputs(((rows, columns), np.int8), ((rows,), np.float32)))
    agree("bf16_from_float", (values,), outputs(((rows, columns), np.uint16)))
    bits = values.view(np.uint32).astype(np.uint16)
    agree("float_from_bf16", (bits,), outputs(((rows, columns), np.float32)))


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_hadamard(version, seed, rows, groups):
    values = np.random.default_rng(seed).standard_normal((rows, groups * 32)).astype(np.float32)
    clear, compiled = values.copy(), values.copy()
    reference.hadamard(clear)
    native.hadamard(compiled)
    assert clear.tobytes() == compiled.tobytes()
    turned = values.reshape(-1, 32).astype(np.float64) @ rotation.block()
    assert np.allclose(turned, compiled.reshape(-1, 32), atol=1e-5)


def test_every_e4m3_byte_under_every_exponent(version):
    """Each finite byte as the largest of a group, under each scale that keeps all of them in range."""
    byte = np.arange(256, dtype=np.uint8)
    byte[(byte & 0x7F) == 0x7F] ^= 1
    exponent = np.arange(247, dtype=np.uint8)  # 448 * 2 ** (247 - 127) passes float32
    group = np.random.default_rng(0).integers(0, 128, (247, 256, 32), dtype=np.uint8) % (byte[:, None] % 128 + 1)
    group[..., 5] = byte
    rows, scales = group.reshape(-1, 32), exponent.repeat(256)[:, None]
    shapes = (((len(rows), 32), np.int8), ((len(rows), 1), np.float32))
    assert agree("engram_int8_from_fp8", (rows, scales), outputs(*shapes)) == -1
    tiles = group.reshape(247 * 32, 8 * 32)  # 32 rows by 8 tiles share a scale
    shapes = ((tiles.shape, np.int8), ((len(tiles),), np.float32))
    assert agree("int8_from_fp8_tiles", (tiles, exponent[:, None].repeat(8, 1)), outputs(*shapes)) == -1


@pytest.mark.parametrize("exponent", [*range(246, 256)])
def test_out_of_range(version, exponent):
    """Scales whose products may pass float32, and the NaN scale, which zeros do not hide."""
    scale = np.full((1, 1), exponent, np.uint8)
    refused = 0
    for byte in range(128):
        group = np.zeros((1, 32), np.uint8)
        group[0, 7] = byte
        place = agree("engram_int8_from_fp8", (group, scale), outputs(((1, 32), np.int8), ((1, 1), np.float32)))
        assert agree("int8_from_fp8_tiles", (group, scale), outputs(((1, 32), np.int8), ((1,), np.float32))) == place
        refused += place == 0
        agree("int8_from_mxfp4", (group[:, :16], scale), outputs(((1, 32), np.int8), ((1,), np.float32)))
    assert refused == (
        128 if exponent == 255 else 1 + sum(e4m3(b) * 2.0 ** (exponent - 127) >= 2**128 for b in range(127))
    )


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa * 2.0**-9


def test_the_place_of_the_first_bad_value(version):
    weight, exponents = np.zeros((70, 96), np.uint8), np.full((3, 3), 127, np.uint8)
    weight[65, 40] = 0xFF
    shapes = ((weight.shape, np.int8), ((70,), np.float32))
    assert agree("int8_from_fp8_tiles", (weight, exponents), outputs(*shapes)) == 65 * 96 + 32
    exponents[1, 2] = 255
    assert agree("int8_from_fp8_tiles", (weight, exponents), outputs(*shapes)) == 32 * 96 + 64


def test_wrong_shapes_are_refused():
    weight, exponents = np.zeros((4, 32), np.uint8), np.zeros((4, 2), np.uint8)
    codes, scales = np.zeros((4, 64), np.int8), np.zeros(4, np.float32)
    assert native.int8_from_mxfp4(weight, exponents, codes, scales) == -1
    with pytest.raises(ValueError, match=r"exponents is uint8 \[4, 1\], expected uint8 \[4, 2\]"):
        native.int8_from_mxfp4(weight, exponents[:, :1], codes, scales)
    with pytest.raises(ValueError, match="not contiguous"):
        native.int8_from_mxfp4(np.zeros((4, 64), np.uint8)[:, ::2], exponents, codes, scales)


def test_an_output_that_is_read_only():
    values = np.frombuffer(bytes(128), np.float32).reshape(1, 32)
    with pytest.raises(ValueError, match=r"hadamard: an output of shape \(1, 32\) is read-only"):
        native.hadamard(values)


@pytest.mark.parametrize("bits", [0x7FFF8000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800000, 0x7F7FFFFF])
def test_bf16_of_what_is_not_finite(version, bits):
    """Among them NaN whose payload would carry over into the sign, and the largest number, which rounds to infinity."""
    values = np.array([[1.0, 0.0]], np.float32)
    values.view(np.uint32)[0, 1] = bits
    assert agree("bf16_from_float", (values,), outputs(((1, 2), np.uint16))) == 1


def test_scales_survive_bf16(version):
    random = np.random.default_rng(0)
    values = random.standard_normal((500, 64)).astype(np.float32) * 2.0 ** random.integers(-60, 60, (500, 1))
    values = values.astype(np.float32)
    codes, scales = np.empty((500, 64), np.int8), np.empty(500, np.float32)
    assert native.int8_from_float(values, codes, scales) == -1
    assert not (scales.view(np.uint32) & 0xFFFF).any()  # a BF16 number
    absmax = np.abs(values).max(1).astype(np.float64)
    assert (scales * 127.0 >= absmax).all()
    below = (scales.view(np.uint32) - 0x10000).view(np.float32).astype(np.float64)  # the BF16 number before it
    assert (below * 127 < absmax).all()


# ---- Engram ----------------------------------------------------------------------------------------------------------


@given(
    st.data(),
    st.integers(1, 40),
    st.sampled_from([1, 3, 7, 16]),
    st.sampled_from([(32, 1), (64, 2), (256, 8), (40, 5)]),
)
@settings(max_examples=150, deadline=None)
def test_engram_look_up(version, data, rows, chunk_rows, shape):
    """Bit by bit as the operator's reference, in BF16 and float32, from tables in any number of chunks; scales are
    powers of two, any numbers, infinite or not a number."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dim, groups = shape
    codes = torch.from_numpy(random.integers(-128, 128, (rows, dim), dtype=np.int8))
    kind = data.draw(st.sampled_from(["power", "any", "bits"]))
    scale = np.exp2(random.integers(-149, 127, (rows, groups)).astype(np.float64)).astype(np.float32)
    if kind == "any":
        scale = random.standard_normal((rows, groups)).astype(np.float32)
    if kind == "bits":
        scale = random.integers(0, 2**32, (rows, groups), dtype=np.uint32).view(np.float32)
    scales = torch.from_numpy(scale)
    ids = torch.from_numpy(random.integers(-3, rows + 3, (data.draw(st.integers(0, 70)), 2)))
    ids[ids == -3] = data.draw(st.sampled_from([-(2**63), 2**63 - 1]))
    chunks = torch.tensor([[codes[row:].data_ptr(), scales[row:].data_ptr()] for row in range(0, rows, chunk_rows)])
    for dtype in (torch.bfloat16, torch.float32):
        wanted = engram.engram_lookup.implementations["reference"](codes, scales, ids, dtype)
        found = engram.engram_lookup_mapped.implementations["cpu"](chunks, ids, rows, chunk_rows, dim, groups, dtype)
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(5.0), wanted.nan_to_num(5.0))
        assert torch.equal(engram.engram_lookup(codes, scales, ids, dtype).nan_to_num(5.0), wanted.nan_to_num(5.0))


@given(st.integers(0, 2**32), st.integers(0, 40), st.integers(2, 5), st.integers(1, 3), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_engram_hash(version, seed, tokens, orders, layers, heads):
    """As the operator's reference: products wrap around, remainders are never negative, dead ids hide older ones."""
    random = np.random.default_rng(seed)
    ngrams = torch.from_numpy(random.integers(-1, 99_092, (tokens, orders)))
    multipliers = torch.from_numpy(random.integers(-(2**62), 2**62, (layers, orders)))
    primes = torch.from_numpy(random.integers(2, 2**40, (layers, orders - 1, heads)))
    offsets = torch.from_numpy(random.integers(0, 2**40, (layers, (orders - 1) * heads)))
    wanted = engram.hash_ngrams.implementations["reference"](ngrams, multipliers, primes, offsets, 2)
    assert torch.equal(engram.hash_ngrams(ngrams, multipliers, primes, offsets, 2), wanted)


def test_operators_refuse_wrong_tensors():
    look_up, ids = engram.engram_lookup_mapped.implementations["cpu"], torch.zeros(3, 1, dtype=torch.int64)
    addresses = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"addresses are \[2, 2\] for 40 rows in chunks of 16, expected \[3, 2\]"):
        look_up(addresses, ids, 40, 16, 64, 2, torch.float32)
    with pytest.raises(ValueError, match=r"ids torch\.int32; both must be int64"):
        look_up(addresses, ids.int(), 32, 16, 64, 2, torch.float32)


@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("scale", [torch.float32, torch.float16])
def test_what_is_not_compiled_is_the_reference(table, scale):
    """Tables and scales of other dtypes, strides, or rows of no whole groups."""
    codes, factors = (torch.randn(50, 64) * 9).to(table), torch.rand(50, 2).to(scale)
    ids = torch.randint(-3, 60, (7, 3))
    for one, other in ((codes, factors), (codes[::2], factors[::2]), (codes[:, :32].contiguous(), factors)):
        wanted = engram.engram_lookup.implementations["reference"](one, other, ids, torch.float32)
        assert torch.equal(engram.engram_lookup(one, other, ids, torch.float32), wanted)


def test_look_up_refuses_wrong_arrays():
    ids, out = np.zeros(3, np.int64), np.zeros((3, 64), np.uint16)
    with pytest.raises(ValueError, match="chunks is int64"):
        native.engram_rows(np.zeros((1, 2), np.int64), ids, 40, 16, 2, out)
    with pytest.raises(ValueError, match=r"rows of 8256 codes, expected 2 .* to 8192"):
        native.engram_rows(np.zeros((1, 2), np.int64), ids, 10, 16, 2, np.zeros((3, 8256), np.uint16))
    with pytest.raises(ValueError, match="ids is int32"):
        native.engram_rows(np.zeros((1, 2), np.int64), ids.astype(np.int32), 10, 16, 2, out)


def test_work_is_spread_over_threads_without_gaps():
    done = np.zeros(1000, np.int32)

    def add(begin: int, end: int) -> None:
        done[begin:end] += 1

    for threads in (1, 2, 3, 7, 2000):
        threads_module.spread(add, len(done), threads)
    assert (done == 5).all()
    threads_module.spread(add, 0, 4)

    def fail(begin: int, end: int) -> None:
        if begin:
            raise ZeroDivisionError(begin)

    with pytest.raises(ZeroDivisionError):
        threads_module.spread(fail, 100, 3)


def test_new_threads_may_run_where_any_thread_may():
    """vLLM pins the main thread to one processor, and its mask would be inherited."""
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        holder = threads_module.ThreadPoolExecutor(1, initializer=lambda: os.sched_setaffinity(0, allowed))
        holder.submit(int).result()
        assert threads_module.processors() == allowed
        threads_module.pool.cache_clear()
        assert threads_module.pool(1).submit(os.sched_getaffinity, 0).result() == allowed
        holder.shutdown()
    finally:
        os.sched_setaffinity(0, allowed)
