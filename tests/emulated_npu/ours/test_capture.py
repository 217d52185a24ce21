"""A decode step that cannot be captured: the error says which, how much memory was free, and what to change."""

import pytest

from emulated_npu.ours.trace import PLUGINS

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(fresh=True)]


def test_what_a_failed_capture_says(converted, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", PLUGINS)
    from emulated_npu import library
    from emulated_npu.peer.engine import Engine

    library.inject("aclmdlRICaptureEnd", 207008, call=2)  # the largest size is captured first
    with pytest.raises(
        Exception, match=r"the decode graph of 2 tokens could not be captured; \d+\.\d+ of 64"
    ) as caught:
        Engine(
            str(converted("a", "w8a8")),
            graphs=True,
            quantization="ascend",
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
        )
    assert "Sizes asked for: [1, 2, 4]" in str(caught.value)
    assert "--enforce-eager" in str(caught.value)
