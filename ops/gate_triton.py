"""The Engram gate on Ascend NPUs, in Triton-Ascend: a program takes one stream of every n-th token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 4096  # times streams: a device takes fewer than 65,536
LARGEST = 1024  # values at once: a row of 5120 in five parts leaves room in the unified buffer


@triton.jit(do_not_specialize=["tokens"])
def inject(
    streams, kv, weight, dead, out, tokens, kv_stride, eps,
    HC: tl.constexpr, DIM: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """streams, out [T, HC, DIM]; kv [T, (HC + 1) DIM], keys then the value; weight [HC, DIM] float32; dead [T]."""
    stream = tl.program_id(1)
    offset = tl.arange(0, PART)
    for at_token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(at_token, tl.int64)
        x_at = streams + (token * HC + stream) * DIM
        key_at = kv + token * kv_stride + stream * DIM
        value_at = kv + token * kv_stride + HC * DIM
        out_at = out + (token * HC + stream) * DIM
        dot = tl.zeros((PART,), tl.float32)
        x_square = tl.zeros((PART,), tl.float32)
        key_square = tl.zeros((PART,), tl.float32)
        for start in range(0, DIM, PART):
            inside = start + offset < DIM
            x = tl.load(x_at + start + offset, inside, 0.0).to(tl.float32)
            key = tl.load(key_at + start + offset, inside, 0.0).to(tl.float32)
            dot += x * tl.load(weight + stream * DIM + start + offset, inside, 0.0) * key
            x_square += x * x
            key_square += key * key
        scale = tl.sqrt(tl.sum(x_square, 0) / DIM + eps) * tl.sqrt(tl.sum(key_square, 0) / DIM + eps)
        product = tl.sum(dot, 0) / scale / tl.sqrt(DIM + 0.0)
        root = tl.sqrt(tl.maximum(tl.abs(product), 1e-6))
        gate = 1.0 / (1.0 + tl.exp(tl.where(product < 0, root, -root)))
        gate = tl.where(tl.load(dead + token) != 0, 0.0, gate)
        for start in range(0, DIM, PART):
            inside = start + offset < DIM
            x = tl.load(x_at + start + offset, inside, 0.0).to(tl.float32)
            value = tl.load(value_at + start + offset, inside, 0.0).to(tl.float32)
            tl.store(out_at + start + offset, (x + gate * value).to(out.dtype.element_ty), inside)


def engram_inject_npu(streams: Tensor, kv: Tensor, qk_weight: Tensor, dead: Tensor, eps: float) -> Tensor:
    """``ops.engram_inject`` on an NPU, without rotation."""
    tokens, hc, dim = streams.shape
    streams = streams.contiguous()
    out = torch.empty_like(streams)
    if tokens:
        part = min(triton.next_power_of_2(dim), LARGEST)
        inject[(min(tokens, PROGRAMS), hc)](
            streams, kv, qk_weight, dead, out, tokens, kv.stride(0), eps, HC=hc, DIM=dim, PART=part
        )  # fmt: skip
    return out
