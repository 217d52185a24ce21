"""What the plugin adds to vLLM's registries; harmless when called again."""

from __future__ import annotations

from .. import upstream
from ..upstream import QUANTIZATION_METHODS, ModelRegistry, register_quantization_config

ARCHITECTURE = "DeepseekV41ForCausalLM"
#: What vllm-ascend calls the draft while it reads --speculative-config: it is looked up, and never built.
ASCEND_DRAFT = "DeepseekV41DSparkModel"
MODEL = "vllm_ascend_dsv41.model.backbone:DeepseekV41ForCausalLM"


def register_quantization(on_npu: bool = False) -> None:
    """Make ``--quantization ascend`` known. On NPUs vllm-ascend has a method of that name: ours takes its place."""
    if on_npu:
        from ..quantization.npu import NpuAscendConfig

        register_quantization_config("ascend")(NpuAscendConfig)
    elif "ascend" not in QUANTIZATION_METHODS:
        from ..quantization import AscendConfig

        register_quantization_config("ascend")(AscendConfig)


def register_all() -> None:
    """Quantisation method and model where our platform rules."""
    from . import NPU, select

    chosen = select()
    if chosen is None:
        return
    from .model_config import adapt_config

    if chosen == NPU:  # the quantisation method is registered by the platform, behind vllm-ascend's
        # in every process: the scheduler's is one in which no platform option is read and no worker made
        upstream.adapt_patch(is_global_patch=True)
        ModelRegistry.register_model(ASCEND_DRAFT, MODEL)
    else:
        register_quantization()
    adapt_config(ARCHITECTURE)
    ModelRegistry.register_model(ARCHITECTURE, MODEL)
