"""Small replicated parameters that vLLM has no layer for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops import float_linear, rms_norm, rms_norm_cast, rms_norm_quantize
from ..quantization.linear import Quantized


class CheckpointShapeError(ValueError):
    """A tensor does not have its parameter's shape."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """An uninitialised parameter that no optimiser touches."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def copy_into(parameter: Tensor, value: Tensor) -> None:
    """Copy a checkpoint tensor, converting its dtype. Raises CheckpointShapeError."""
    if parameter.shape != value.shape:
        raise CheckpointShapeError(f"shape {list(value.shape)}, expected {list(parameter.shape)}")
    parameter.data.copy_(value)


class Norm(nn.Module):
    """RMSNorm with a float32 weight [dim]."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = empty(dim), eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class WideNorm(Norm):
    """RMSNorm whose result is wanted in float32, too."""

    def after_loading(self) -> None:
        """Bring the weight into the dtype that the operator reads."""
        self.weight.data = rms_norm_cast.pack(1, self.weight.data)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x [T, dim] -> the same in x's dtype and in float32."""
        return rms_norm_cast(x, self.weight, self.eps)


class QuantizingNorm(Norm):
    """RMSNorm in front of W8A8 linears, and of nothing else."""

    def after_loading(self) -> None:
        """As ``WideNorm.after_loading``."""
        self.weight.data = rms_norm_quantize.pack(1, self.weight.data)

    def forward(self, x: Tensor) -> Quantized:  # type: ignore[override]
        """x [T, dim] -> codes and scale."""
        return Quantized(*rms_norm_quantize(x, self.weight, self.eps), x.dtype)


class FloatMatrix(nn.Module):
    """A replicated linear that stays in floating point; ``parts`` checkpoint matrices stacked by rows."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, parts: int = 1) -> None:
        super().__init__()
        self.weight = empty(parts * out_features, in_features, dtype=dtype)
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]

        self.rows = out_features

    def _load(self, parameter: Tensor, value: Tensor, part: int = 0) -> None:
        copy_into(parameter[part * self.rows : (part + 1) * self.rows], value)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [..., in] -> [..., parts * out] in ``dtype`` (x's)."""
        return float_linear(x, self.weight, dtype)
