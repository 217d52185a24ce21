"""Routed experts under vllm-ascend's runner, which chooses how ranks exchange tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..upstream import (
    _EXTRA_CTX,
    AscendFusedMoEMethod,
    AscendUnquantizedFusedMoEMethod,
    AscendW8A8DynamicFusedMoEMethod,
    FusedExpertsResult,
    MoECommType,
    RoutedExperts,
)
from .config import AscendConfig
from .moe import FloatMoE, W8A8DynamicMoE


def _held_here(layer: Any) -> tuple[int, int]:
    """First of the experts that this rank holds, and how many there are in all: they lie in the checkpoint's order."""
    config = layer.moe_config
    local = config.num_local_experts
    return (config.ep_rank * local if local < config.num_experts else 0), config.num_experts


class _Scheme(AscendW8A8DynamicFusedMoEMethod):  # type: ignore[misc]
    """vllm-ascend's W8A8 experts with FP32 scales: upstream keeps them in the model's dtype."""

    def get_dynamic_quant_param(
        self, num_experts: int, intermediate_size_per_partition: int, hidden_sizes: int, params_dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Scales per output channel; the checkpoint's offsets are zero and not kept."""
        rows = {"w13": 2 * intermediate_size_per_partition, "w2": hidden_sizes}
        return {f"{name}_weight_scale": torch.empty(num_experts, n, 1, dtype=torch.float32) for name, n in rows.items()}

    def process_weights_after_loading(self, layer: Any) -> None:
        """The layout that our operator reads is that of upstream's path, too."""
        W8A8DynamicMoE.process_weights_after_loading(self, layer)
        layer.w13_weight_scale_fp32 = layer.w13_weight_scale.data

    operator, packed = W8A8DynamicMoE.operator, W8A8DynamicMoE.packed

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Where every rank has all tokens, our operator; else upstream's exchange around its grouped products."""
        if _EXTRA_CTX.moe_comm_type is not MoECommType.ALLGATHER:
            return super().apply(layer, x, topk_weights, topk_ids, *args, **kwargs)
        stacks = (layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale)
        limit = layer.moe_config.swiglu_limit or 0.0
        out = self.operator(x, *stacks, topk_weights, topk_ids, limit, *_held_here(layer))
        return FusedExpertsResult(routed_out=out)

    def apply_gmm2(self, mlp_compute_input: Any, hidden_states: Tensor, act_out_scale: Tensor) -> Tensor:
        """As upstream, whose output has the dtype of its scales."""
        from ..ops.npu.moe import second_product

        given = mlp_compute_input
        return second_product(
            hidden_states,
            act_out_scale,
            given.layer.w2_weight,
            given.layer.w2_weight_scale,
            given.group_list,
            given.group_list_type,
            self.in_dtype,
        )


class _FloatScheme(AscendUnquantizedFusedMoEMethod):  # type: ignore[misc]
    """vllm-ascend's unquantised experts, with our operator where every rank has all tokens."""

    operator, packed = FloatMoE.operator, FloatMoE.packed

    def process_weights_after_loading(self, layer: Any) -> None:
        """[E, in, out], as upstream's path reads them, too."""
        FloatMoE.process_weights_after_loading(self, layer)

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As ``_Scheme.apply``."""
        if _EXTRA_CTX.moe_comm_type is not MoECommType.ALLGATHER:
            return super().apply(layer, x, topk_weights, topk_ids, *args, **kwargs)
        limit = layer.moe_config.swiglu_limit or 0.0
        stacks = layer.w13_weight, layer.w2_weight
        out = self.operator(x, *stacks, topk_weights, topk_ids, limit, *_held_here(layer))
        return FusedExpertsResult(routed_out=out)


class NpuAscendConfig(AscendConfig):
    """The ``ascend`` method on NPUs: everything but the routed experts is the same."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str, tid2eid: Any = None) -> Any:
        """As the parent; ``tid2eid`` (hash routing) is vllm-ascend's argument, of other models."""
        del tid2eid
        if not isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        if self.label(prefix) == "W8A8_DYNAMIC":
            return AscendFusedMoEMethod(_Scheme(), layer.moe_config)
        return _FloatScheme(layer.moe_config)
