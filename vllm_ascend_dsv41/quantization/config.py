"""Which method serves which layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..quant import Layout, identify, open_checkpoint
from ..quant.checkpoint import DESCRIPTION, CheckpointError
from ..upstream import LinearBase, QuantizationConfig, RoutedExperts, VocabParallelEmbedding
from .linear import FloatLinear, W8A8DynamicLinear
from .moe import FloatMoE, W8A8DynamicMoE
from .unquantized import FloatEmbedding

# modules that hold several checkpoint tensors -> those tensors
PACKED = {
    "wqa_wkv": ("wq_a", "wkv"),
    "gate_up_proj": ("w1", "w3"),
    "down_proj": ("w2",),
    "experts": ("experts.0.w1", "experts.0.w2", "experts.0.w3"),
}


class AscendConfig(QuantizationConfig):  # type: ignore[misc]
    """Reads ``quant_model_description.json``: one label per tensor key."""

    def __init__(self) -> None:
        super().__init__()
        self.labels: dict[str, str] = {}
        self.directory = ""

    def get_name(self) -> str:
        return "ascend"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return [DESCRIPTION]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> AscendConfig:
        del config  # the labels are read with the checkpoint's directory, in maybe_update_config
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim Ascend checkpoints of this model; refuse the official one under ``--quantization ascend``."""
        if getattr(hf_config, "model_type", None) != "deepseek_v41":
            return None
        method = hf_quant_cfg.get("quant_method")
        if method == "ascend":
            return "ascend"
        if user_quant == "ascend":
            raise CheckpointError(
                f"--quantization ascend: config.json says quant_method {method!r}: this is the official "
                "checkpoint; convert it first: dsv41 quantize SRC DST"
            )
        return None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Check the checkpoint completely and read its labels, before any process loads data."""
        del revision
        kind = getattr(hf_config, "model_type", "deepseek_v41")
        if not kind.startswith("deepseek_v41"):
            raise CheckpointError(
                f"--quantization ascend: {model_name} is a {kind} model; the dsv41 plugin serves deepseek_v41 only. "
                "Leave dsv41 out of VLLM_PLUGINS: vllm-ascend's own platform serves others"
            )
        if identify(model_name) is not Layout.ASCEND:
            raise CheckpointError(
                f"--quantization ascend: {model_name} is in the official layout; convert it: dsv41 quantize SRC DST"
            )
        checkpoint = open_checkpoint(model_name)
        self.directory = str(checkpoint.directory)
        description = json.loads((Path(model_name) / DESCRIPTION).read_text(encoding="utf-8"))
        # one expert stands for all of a layer: open_checkpoint found every label as expected
        self.labels = {
            key: label
            for key, label in description.items()
            if isinstance(label, str) and (".experts." not in key or ".experts.0." in key)
        }

    def label(self, prefix: str) -> str:
        """Label of a module, which may pack several tensors. Raises CheckpointError."""
        parent, _, name = prefix.removeprefix("model.").rpartition(".")
        keys = [f"{parent}.{part}.weight" for part in PACKED.get(name, (name,))]
        labels = {self.labels.get(key) for key in keys}
        if len(labels) != 1 or None in labels:
            found = {key: self.labels.get(key) for key in keys}
            raise CheckpointError(f"{self.directory}/{DESCRIPTION}: {prefix} needs one label, found {found}")
        label = labels.pop()
        if label not in ("W8A8_DYNAMIC", "FLOAT"):
            raise CheckpointError(f"{self.directory}/{DESCRIPTION}: {prefix} is labelled {label!r}, which is unknown")
        return str(label)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a linear, of the routed experts or of an embedding; None for anything else."""
        if isinstance(layer, VocabParallelEmbedding):
            return FloatEmbedding()
        if isinstance(layer, RoutedExperts):
            kind = W8A8DynamicMoE if self.label(prefix) == "W8A8_DYNAMIC" else FloatMoE
            return kind(layer.moe_config)
        if isinstance(layer, LinearBase):
            return W8A8DynamicLinear() if self.label(prefix) == "W8A8_DYNAMIC" else FloatLinear()
        return None
