"""Linears: INT8 with dynamic per-token activations, and floating point."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops import float_linear, quantize_per_token, w8a8_matmul
from ..upstream import ChannelQuantScaleParameter, LinearMethodBase, ModelWeightParameter


class Quantized(NamedTuple):
    """Input of W8A8 linears that was quantised where it was made: codes int8 [T, in], scale float32 [T, 1], and the
    dtype that the linear's output is to have."""

    codes: Tensor
    scale: Tensor
    dtype: torch.dtype


def takes_codes(*layers: Any) -> bool:
    """Whether all of these linears multiply INT8 activations: their input may then be ``Quantized``."""
    return all(isinstance(layer.quant_method, W8A8DynamicLinear) for layer in layers)


class _Linear(LinearMethodBase):  # type: ignore[misc]
    """Weight [out, in] of this rank, left as it was loaded."""

    def weight_dtype(self, params_dtype: torch.dtype) -> torch.dtype:
        return params_dtype

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register the parameters (vLLM ``LinearMethodBase.create_weights``)."""
        shape = (sum(output_partition_sizes), input_size_per_partition)
        data = torch.empty(shape, dtype=self.weight_dtype(params_dtype))
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=extra["weight_loader"])
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing: attention reads ``wo_a.weight`` itself, so it must stay as it is."""


class FloatLinear(_Linear):
    """FLOAT: the model's dtype."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]."""
        y = float_linear(x, layer.weight)
        return y if bias is None else y + bias


class W8A8DynamicLinear(_Linear):
    """W8A8_DYNAMIC: ``weight`` int8 [out, in], ``weight_scale`` float32 [out, 1], never narrowed."""

    def weight_dtype(self, params_dtype: torch.dtype) -> torch.dtype:
        return torch.int8

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register the parameters."""
        super().create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, **extra
        )
        scale = torch.empty(sum(output_partition_sizes), 1, dtype=torch.float32)
        layer.register_parameter(
            "weight_scale",
            ChannelQuantScaleParameter(data=scale, output_dim=0, weight_loader=extra["weight_loader"]),
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring weight and scale into the layout that the operator reads."""
        layer.weight.data = w8a8_matmul.pack(2, layer.weight.data)
        layer.weight_scale.data = w8a8_matmul.pack(3, layer.weight_scale.data)
        layer.weight_scale_fp32 = layer.weight_scale.data  # vllm-ascend's name, for the shared experts

    def apply(self, layer: Any, x: Tensor | Quantized, bias: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out] in x's dtype."""
        given = x if isinstance(x, Quantized) else Quantized(*quantize_per_token(x), x.dtype)
        y = w8a8_matmul(given.codes, given.scale, layer.weight, layer.weight_scale, given.dtype)
        return y if bias is None else y + bias
