"""Normalisation, activation, rotary embedding, padding, casts."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from .. import formats
from ..c_ascend.elementwise import rms, rotate_halves, rotate_pairs
from . import operator


@operator("aclnnRmsNorm", "x:T gamma:T epsilon:d y:T rstd:T")
def rms_norm(a: SimpleNamespace) -> None:
    y, deviation = rms(a.x, a.gamma, a.epsilon)
    a.y.copy_(y)
    if a.rstd is not None:
        a.rstd.copy_(deviation.view(a.rstd.shape))


@operator("aclnnAddRmsNorm", "x1:T x2:T gamma:T epsilon:d y:T rstd:T x:T")
def add_rms_norm(a: SimpleNamespace) -> None:
    total = a.x1 + a.x2
    y, deviation = rms(total, a.gamma, a.epsilon)
    a.y.copy_(y)
    a.rstd.copy_(deviation.view(a.rstd.shape))
    a.x.copy_(total)


@operator("aclnnSwiGlu", "x:T dim:i out:T")
def swiglu(a: SimpleNamespace) -> None:
    gate, up = a.x.float().chunk(2, a.dim)
    a.out.copy_(torch.nn.functional.silu(gate) * up)


def _dynamic_quant(a: SimpleNamespace) -> None:
    """Per row: scale = absmax / 127, codes to nearest even."""
    if a.smooth is not None or a.group_index is not None:
        raise ValueError("dynamic quantisation with smoothing is not listed")
    wide = a.x.float()
    scale = wide.abs().amax(-1) / 127
    a.scale.copy_(scale.view(a.scale.shape))
    a.y.copy_(torch.round(wide / scale.clamp_min(1e-30)[..., None]).clamp(-128, 127))


operator("aclnnDynamicQuantV2", "x:T smooth:T group_index:T dst_type:i y:T scale:T offset:T")(_dynamic_quant)
operator("aclnnDynamicQuantV3", "x:T smooth:T group_index:T dst_type:i symmetric:b mode:s y:T scale:T offset:T")(
    _dynamic_quant
)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return x * cos + (rotate_pairs(x) if interleaved else rotate_halves(x)) * sin


def _rotary_position_embedding(a: SimpleNamespace) -> None:
    """mode 0 turns halves, 1 adjacent pairs; cos and sin hold every angle twice."""
    if a.mode not in (0, 1):
        raise ValueError(f"rotary position embedding: mode {a.mode} is not listed")
    a.out.copy_(_rotate(a.x.float(), a.cos.float(), a.sin.float(), a.mode == 1))


operator("aclnnRotaryPositionEmbedding", "x:T cos:T sin:T mode:i out:T")(_rotary_position_embedding)
operator("aclnnRotaryPositionEmbeddingV2", "x:T cos:T sin:T mode:i rotate:T out:T")(_rotary_position_embedding)


@operator(
    "aclnnRopeWithSinCosCacheV2",
    "positions:T query:T key:T cache:T mrope:A head_size:i neox:b cache_mode:i query_out:T key_out:T",
)
def rope_with_cache(a: SimpleNamespace) -> None:
    """cache [positions, rotated]: cosines, then sines, of half as many angles."""
    cos, sin = a.cache[a.positions.long()].float()[:, None].chunk(2, -1)
    twice = (lambda t: torch.cat([t, t], -1)) if a.neox else (lambda t: t.repeat_interleave(2, -1))
    rotated = a.cache.shape[-1]
    for x, out in ((a.query, a.query_out), (a.key, a.key_out)):
        heads = x.view(x.shape[0], -1, a.head_size).float()
        turned = _rotate(heads[..., :rotated], twice(cos), twice(sin), not a.neox)
        out.copy_(torch.cat([turned, heads[..., rotated:]], -1).view(out.shape))


@operator("aclnnConstantPadNd", "x:T pad:A value:S out:T")
def constant_pad(a: SimpleNamespace) -> None:
    a.out.copy_(torch.nn.functional.pad(a.x, a.pad, value=a.value or 0))


@operator("aclnnNpuFormatCast", "source:T target:T")
def format_cast(a: SimpleNamespace) -> None:
    """Between row-major and FRACTAL_NZ; `attach` gives NZ tensors as row-major copies, so the target is
    written here.
    """
    target = a.described.target
    if target.format != formats.NZ:
        a.target.copy_(a.source)
        return
    formats.write_nz(target, a.source)
