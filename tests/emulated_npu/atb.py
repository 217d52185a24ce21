"""Operators of ATB, which torch_npu calls through C++ classes of libatb: replaced as a whole, by name."""

from __future__ import annotations

import torch

from . import aten
from .dispatch import kernel


def _npu_matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, c: torch.Tensor) -> None:
    """c += x.T @ weight (or x @ weight), in FP32."""
    c.add_(x.float().t() @ weight.float() if x.shape[0] == weight.shape[0] else x.float() @ weight.float())


def _npu_reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    kept = slots >= 0
    for source, cache in ((key, key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots[kept].long()] = source[kept].view(-1, *cache.shape[2:])


REFERENCES = {f.__name__: f for f in (_npu_matmul_add_fp32, _npu_reshape_and_cache)}


def install() -> None:
    library = torch.library.Library("atb", "IMPL")
    aten._library.append(library)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("atb::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
            library.impl(name[5:], kernel("atb", name[5:], REFERENCES, writes=True), "PrivateUse1", allow_override=True)
