"""What the plugin adds to vLLM's registries; harmless when called again."""

from __future__ import annotations

from ..upstream import QUANTIZATION_METHODS, ModelRegistry, register_quantization_config

ARCHITECTURE = "DeepseekV41ForCausalLM"


def register_quantization() -> None:
    """Make ``--quantization ascend`` known."""
    if "ascend" not in QUANTIZATION_METHODS:
        from ..quantization import AscendConfig

        register_quantization_config("ascend")(AscendConfig)


def register_all() -> None:
    """Quantisation method everywhere; the model only where our platform rules."""
    from . import select

    if select() is None:
        return
    from .engram_config import accept_engram_config

    register_quantization()
    accept_engram_config(ARCHITECTURE)
    ModelRegistry.register_model(ARCHITECTURE, "vllm_ascend_dsv41.model.backbone:DeepseekV41ForCausalLM")
