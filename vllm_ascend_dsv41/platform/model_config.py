"""What vLLM's configuration of the model says otherwise than its own kernels for CUDA and ROCm need it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..upstream import MODELS_CONFIG_MAP, EngramConfig, config


@config
class AscendEngramConfig(EngramConfig):  # type: ignore[misc]
    """The fields are vLLM's; which of them can be honoured, ``EngramOptions`` decides."""

    def verify_model_config(self, model_config: Any) -> None:
        """As upstream, for devices other than CUDA's."""
        if not getattr(model_config.hf_text_config, "engram_layer_ids", None):
            raise ValueError("--engram-config: this model has no Engram layers; leave the option out")


def adapt_config(architecture: str) -> None:
    """Let vLLM take --engram-config for the model, which 0.30.0 refuses unless the platform is CUDA; and let pictures
    be split by chunked prefill.

    vLLM's kernels let the tokens of a picture see each other both ways, so that it computes a span in one step.
    DeepSeek's inference code is causal there as everywhere (spec section 3.11, golden image_1 and image_2).

    The hook is vLLM's own place for what an architecture changes in the configuration."""
    upstream = MODELS_CONFIG_MAP.get(architecture)
    if upstream is None or getattr(upstream, "adapted_by_dsv41", False):
        return

    class DeepseekV41Config(upstream):  # type: ignore[misc, valid-type]
        adapted_by_dsv41 = True

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            upstream.verify_and_update_model_config(model_config)
            model_config.hf_config.is_mm_prefix_lm = False
            model_config.hf_config.mm_prefix_clamp_sliding_window = False
            model_config.model_arch_config = model_config.get_model_arch_config()

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            upstream.verify_and_update_config(vllm_config)
            given = vllm_config.engram_config
            if given is None and getattr(vllm_config.model_config.hf_text_config, "engram_layer_ids", None):
                given = EngramConfig()  # as upstream on CUDA: its defaults come from the environment too
            if given is not None and not isinstance(given, AscendEngramConfig):
                values = {field.name: getattr(given, field.name) for field in fields(given)}
                vllm_config.engram_config = AscendEngramConfig(**values)

    MODELS_CONFIG_MAP[architecture] = DeepseekV41Config
