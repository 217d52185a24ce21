"""Adapters to the kernels of Ascend NPUs: argument layout, dtype and storage format, no mathematics of the model.

``torch_npu`` has some of them; those of vllm-ascend's extension (``torch.ops._C_ascend``) exist once the process
loaded it, which vllm-ascend's worker does and ``dsv41 selftest`` too. Imported when a tensor on an NPU first
meets an operator.
"""

from __future__ import annotations

import torch_npu  # noqa: F401  its operators register themselves

from . import attention, compositions, engram, indexer, latents, linear, moe, norm

__all__ = ["attention", "compositions", "engram", "indexer", "latents", "linear", "moe", "norm"]
