"""Which platform rules, and that every name taken from vLLM exists."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

import vllm_ascend_dsv41
from vllm_ascend_dsv41 import platform, upstream


@pytest.mark.parametrize("name", sorted(upstream.NAMES))
def test_upstream_names_exist(name):
    assert getattr(upstream, name) is not None


def test_a_name_that_is_gone_is_reported_with_the_version(monkeypatch):
    monkeypatch.setitem(upstream.NAMES, "Gone", "vllm.config")
    with pytest.raises(ImportError, match=r"vllm.* 0\.30\.0.* has no vllm\.config\.Gone"):
        _ = upstream.Gone
    with pytest.raises(AttributeError, match="no attribute 'Unknown'"):
        _ = upstream.Unknown


def test_cpu_machine():
    assert vllm_ascend_dsv41.platform_plugin() == platform.CPU
    from vllm.platforms import current_platform

    assert type(current_platform).__module__ == "vllm_ascend_dsv41.platform.cpu"


@pytest.mark.parametrize("attribute", ["cuda", "hip"])
def test_stands_aside_on_gpus(monkeypatch, attribute):
    monkeypatch.setattr(torch.version, attribute, "13.0")
    assert vllm_ascend_dsv41.platform_plugin() is None


def test_stands_aside_beside_another_platform_plugin(monkeypatch, caplog):
    entry = type("Entry", (), {"name": "ascend"})
    monkeypatch.setattr(platform, "entry_points", lambda group: [entry])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    logger = logging.getLogger("vllm.dsv41")
    monkeypatch.setattr(logger.parent, "propagate", True)
    with caplog.at_level("WARNING"):
        assert vllm_ascend_dsv41.platform_plugin() is None
    assert "ascend is installed too. Set VLLM_PLUGINS=dsv41" in caplog.text
    monkeypatch.setenv("VLLM_PLUGINS", "dsv41")
    assert vllm_ascend_dsv41.platform_plugin() == platform.CPU


def test_registration_is_repeatable():
    vllm_ascend_dsv41.register()
    vllm_ascend_dsv41.register()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert QUANTIZATION_METHODS.count("ascend") == 1


def test_sizes_that_kernels_refuse_are_named():
    from vllm_ascend_dsv41.platform.kernel_sizes import outside

    released = {
        "num_attention_heads": 64,
        "head_dim": 512,
        "sliding_window": 128,
        "index_topk": 512,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "candidate_topk_blocks": 2048,
    }
    for ranks in (1, 2, 4, 8, 16):
        assert outside(SimpleNamespace(**released), ranks) == []
    tiny = SimpleNamespace(**{**released, "num_attention_heads": 12, "index_head_dim": 64, "candidate_topk_blocks": 6})
    assert outside(tiny, 2) == [
        "index_head_dim 64, expected 128",
        "6 heads a rank, expected a power of two up to 128",
        "candidate_topk_blocks 6, expected a multiple of 64 up to 2048",
    ]
