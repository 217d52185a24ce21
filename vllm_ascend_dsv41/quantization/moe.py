"""Routed experts: INT8 with dynamic per-token activations, and floating point."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..ops import Operator, moe_float, moe_w8a8
from ..upstream import FusedMoEMethodBase, set_weight_attrs


class _MoE(FusedMoEMethodBase):  # type: ignore[misc]
    """Expert stacks ``w13`` [E, 2 I, H] and ``w2`` [E, H, I] of this rank, under TP or EP."""

    operator: Operator[..., Tensor]
    packed: ClassVar[dict[int, str]]  # argument of the operator -> parameter

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: our operators are called directly, not vLLM's modular kernels."""
        return

    def weight_dtype(self, params_dtype: torch.dtype) -> torch.dtype:
        return params_dtype

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register the parameters (vLLM ``FusedMoEMethodBase.create_weights``)."""
        inner = intermediate_size_per_partition
        dtype = self.weight_dtype(params_dtype)
        self._add(layer, "w13_weight", (num_experts, 2 * inner, hidden_size), dtype, extra)
        self._add(layer, "w2_weight", (num_experts, hidden_size, inner), dtype, extra)

    def _add(
        self,
        layer: nn.Module,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        extra: dict[str, Any],
        **more: Any,
    ) -> None:
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        layer.register_parameter(name, parameter)
        set_weight_attrs(parameter, {"weight_loader": extra["weight_loader"], **more})

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring the stacks into the layout that their operator reads."""
        for position, name in self.packed.items():
            parameter = getattr(layer, name)
            parameter.data = self.operator.pack(position, parameter.data)

    def local_ids(self, layer: Any, topk_ids: Tensor) -> Tensor:
        """Global expert ids [T, k] -> ids within this rank, -1 for experts elsewhere."""
        ids = topk_ids.long()
        return ids if layer.expert_map is None else layer.expert_map.long()[ids]


class FloatMoE(_MoE):
    """FLOAT: the model's dtype."""

    operator, packed = moe_float, {1: "w13_weight", 2: "w2_weight"}

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x [T, H] -> sum of the local experts [T, H]; vLLM reduces over ranks and adds the shared expert."""
        ids = self.local_ids(layer, topk_ids)
        return moe_float(x, layer.w13_weight, layer.w2_weight, topk_weights, ids, layer.swiglu_limit)


class W8A8DynamicMoE(_MoE):
    """W8A8_DYNAMIC: int8 stacks with float32 scales per output channel."""

    operator = moe_w8a8
    packed: ClassVar = {1: "w13_weight", 2: "w13_weight_scale", 3: "w2_weight", 4: "w2_weight_scale"}

    def weight_dtype(self, params_dtype: torch.dtype) -> torch.dtype:
        return torch.int8

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register the parameters."""
        super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra)
        shapes = {"w13": 2 * intermediate_size_per_partition, "w2": hidden_size}
        for name, rows in shapes.items():
            shape = (num_experts, rows, 1)
            self._add(layer, f"{name}_weight_scale", shape, torch.float32, extra, quant_method="channel")

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """As FloatMoE.apply."""
        return moe_w8a8(
            x,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            topk_weights,
            self.local_ids(layer, topk_ids),
            layer.swiglu_limit,
        )
