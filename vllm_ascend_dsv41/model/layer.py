"""One layer, of the trunk or of the draft: attention and experts between hyper-connections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layer_plan import LayerPlan
from ..ops import hc_expand, hc_pre
from .attention import Attention
from .compressor import Compressor
from .engram import Engram
from .moe import MoE
from .parameters import Norm, QuantizingNorm, WideNorm, empty
from .step import Step


def spread(x: Tensor, hc: int) -> tuple[Tensor, Tensor]:
    """Embeddings [T, D] -> streams [T, hc, D], all alike, and ``pre`` [T, hc]: the first collapse reads stream 0."""
    pre = torch.zeros(len(x), hc, dtype=torch.float32, device=x.device)
    pre[:, 0] = 1.0
    return x[:, None].expand(-1, hc, -1).contiguous(), pre


class HyperConnection(nn.Module):
    """The coefficients of one sublayer (spec section 3.1)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hc = config.hc_mult
        mix = (2 + hc) * hc
        self.fn, self.base, self.scale = empty(mix, hc * config.hidden_size), empty(mix), empty(3)
        self.iterations, self.eps, self.norm_eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps

    def forward(self, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """streams [T, hc, D], pre [T, hc] of the sublayer before -> its input [T, D], pre, post, comb [T, hc, hc]."""
        return hc_pre(streams, pre, self.fn, self.scale, self.base, self.iterations, self.eps, self.norm_eps)


class Layer(nn.Module):
    """Each sublayer's input is collapsed with the coefficients of the sublayer before it.

    ``engram``, where the layer has one, changes the streams in front of the layer: the backbone calls it, since the
    draft reads what lies between.
    """

    def __init__(
        self,
        config: Any,
        plan: LayerPlan,
        sources: dict[int, Compressor],
        engram: Engram | None,
        dtype: torch.dtype,
        quant_config: Any,
        prefix: str,
        attention: type[Attention] = Attention,
    ) -> None:
        super().__init__()
        self.engram = engram
        self.hc_attn, self.hc_ffn = HyperConnection(config), HyperConnection(config)
        self.attn = attention(config, plan, sources, dtype, quant_config, f"{prefix}.attn")
        norm = QuantizingNorm if self.attn.input_quantized else Norm
        self.attn_norm = norm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = WideNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, plan, dtype, quant_config, f"{prefix}.ffn")

    def forward(self, streams: Tensor, pre: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """streams [T, hc, D], pre [T, hc] -> the same after this layer."""
        x, pre, post, comb = self.hc_attn(streams, pre)
        streams = hc_expand(self.attn(self.attn_norm(x), step), streams, post, comb)
        x, pre, post, comb = self.hc_ffn(streams, pre)
        return hc_expand(self.ffn(*self.ffn_norm(x), step), streams, post, comb), pre
