"""vLLM's --engram-config on platforms that vLLM itself has no Engram for."""

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


def accept_engram_config(architecture: str) -> None:
    """Let vLLM take --engram-config for the model: 0.30.0 refuses it unless the platform is CUDA.

    The hook is vLLM's own place for what an architecture changes in the configuration."""
    upstream = MODELS_CONFIG_MAP.get(architecture)
    if upstream is None or getattr(upstream, "accepts_engram_config", False):
        return

    class DeepseekV41Config(upstream):  # type: ignore[misc, valid-type]
        accepts_engram_config = True

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
