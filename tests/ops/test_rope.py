"""The rotary embedding that serving uses, on DeepSeek's own numbers."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_dsv41.ops import rope_frequencies, rope_rotation


@pytest.mark.parametrize("name", ["released.window", "released.yarn", "window", "yarn"])
def test_tables(golden, name):
    u = golden("a", "unit_rope")
    released = name.startswith("released")
    positions = u["released.positions" if released else "positions"]
    dim, original = (64, 65536) if released else (16, 64)
    yarn = (160000.0, 16.0, 32, 1, original) if name.endswith("yarn") else (10000.0,)
    rotation = rope_rotation(rope_frequencies(dim, *yarn), positions)
    rows = torch.cat((rotation.cos, rotation.sin), dim=-1)
    assert torch.allclose(rows, torch.cat((u[f"{name}.cos"], u[f"{name}.sin"]), dim=-1), atol=1e-5, rtol=0)
