"""Number formats of the two checkpoints."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_dsv41.ops import quantize_channels, quantize_engram_rows, quantize_per_token
from vllm_ascend_dsv41.ops.mx import decode_e8m0, decode_fp4, decode_fp8_rows, decode_fp8_tiles


@pytest.mark.parametrize(("code", "value"), [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (254, 2.0**127)])
def test_e8m0(code, value):
    assert decode_e8m0(torch.tensor([code], dtype=torch.uint8)).item() == value


def test_e8m0_255_is_not_a_number():
    assert decode_e8m0(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_decoding_does_not_depend_on_the_default_dtype(default):
    """vLLM builds models under another default dtype."""
    torch.set_default_dtype(default)
    try:
        scale = decode_e8m0(torch.tensor([[3]], dtype=torch.uint8))
        packed = decode_fp4(
            torch.tensor([[0x21]] * 1, dtype=torch.uint8).repeat(1, 16).view(torch.int8),
            torch.tensor([[127]], dtype=torch.uint8),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert scale.dtype is packed.dtype is torch.float32


def test_fp4_low_nibble_first():
    packed = torch.tensor([[0x21, 0xF0] + [0] * 14], dtype=torch.uint8).view(torch.int8)
    values = decode_fp4(packed, torch.tensor([[128]], dtype=torch.uint8))
    assert values[0, :4].tolist() == [1.0, 2.0, 0.0, -12.0]


def test_fp8_tiles_and_rows():
    weight = torch.ones(40, 64).to(torch.float8_e4m3fn)
    scale = torch.tensor([[127, 128], [129, 130]], dtype=torch.uint8)
    values = decode_fp8_tiles(weight, scale)
    assert [values[0, 0], values[0, 63], values[39, 0], values[39, 63]] == [1, 2, 4, 8]
    rows = decode_fp8_rows(weight[:2], scale)
    assert [rows[0, 0], rows[0, 63], rows[1, 0], rows[1, 63]] == [1, 2, 4, 8]


def test_channels():
    weight = torch.tensor([[127.0, -63.5, 1.0], [0.0, 0.0, 0.0], [-1e-30, 0.0, 5e-31]])
    codes, scale = quantize_channels(weight)
    assert codes.tolist() == [[127, -64, 1], [0, 0, 0], [-127, 0, 63]]  # 1e-30 / 127 is not a BF16 number
    assert scale.dtype is torch.float32
    assert scale[1].item() == 0


def test_per_token_zero_row():
    codes, scale = quantize_per_token(torch.tensor([[0.0, 0.0], [254.0, -127.0]]))
    assert codes.tolist() == [[0, 0], [127, -64]]
    assert scale.tolist() == [[0.0], [2.0]]


@pytest.mark.parametrize(
    ("largest", "scale"), [(127.0, 1.0), (127.5, 2.0), (254.0, 2.0), (254.5, 4.0), (0.0, 1.0), (2.0**-9, 2.0**-15)]
)
def test_engram_rows_have_power_of_two_scales(largest, scale):
    rows = torch.zeros(1, 32)
    rows[0, 5] = -largest
    codes, found = quantize_engram_rows(rows)
    assert found.tolist() == [[scale]]
    assert codes[0, 5].item() == max(-127, -round(largest / scale))


def test_engram_rows_of_fp8_values_lose_at_most_half_a_step():
    generator = torch.Generator().manual_seed(0)
    rows = (torch.randn(64, 64, generator=generator) * 100).to(torch.float8_e4m3fn).float()
    codes, scale = quantize_engram_rows(rows)
    back = codes.float() * scale.repeat_interleave(32, 1)
    assert ((back - rows).abs() <= scale.repeat_interleave(32, 1) / 2).all()
