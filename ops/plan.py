"""What kernels work out once per step for all layers that read one cache."""

from __future__ import annotations

from torch import Tensor

from .batch import Batch


def plan(lengths: Tensor, batch: Batch, kind: str, *arguments: int) -> Tensor | None:
    """On NPUs how a kernel divides a step's work, int32 [1024]; None elsewhere. ``lengths``: those of the batch.

    kind "attention": heads, head dim, window, ratio (0: no compressed rows), rows selected; "index": heads, head dim,
    rows selected, ratio.
    """
    if lengths.device.type != "npu":
        return None
    from .npu import plans

    return plans.make(batch, kind, *arguments)
