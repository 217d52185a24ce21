"""What our Triton kernels compute, by the references of their operators, for tests of whole engines: the interpreter
takes 7 ms a token and layer. ``EMULATED_TRITON=vectorised`` asks for it; test_adapters.py interprets the kernels, and
test_model.py's first test does, too.

Arguments are the kernels' own, as views of device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from vllm_ascend_dsv41 import ops
from vllm_ascend_dsv41.ops.registry import REFERENCE


def latents(
    q: Tensor,
    kv: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    cache: Tensor,
    *numbers: Any,
    HEADS: int,
    SLOTS: bool,
    **_: Any,
) -> None:
    run = ops.store_latents.implementations[REFERENCE]
    turned = run(q if HEADS else None, kv, weight, numbers[3], ops.Rotation(cos, sin), cache, slots if SLOTS else None)
    if turned is not None:
        q.copy_(turned)


def compressed(
    latent: Tensor,
    key: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    row_slots: Tensor,
    key_slots: Tensor,
    rows: Tensor,
    keys: Tensor,
    scales: Tensor,
    *numbers: Any,
    CODES: bool,
    RATIO: int,
    **_: Any,
) -> None:
    run = ops.store_compressed.implementations[REFERENCE]
    own = (latent, key, weight, numbers[5], ops.Rotation(cos, sin))
    run(*own, rows, row_slots, keys, scales if CODES else None, key_slots, RATIO)


def inject(
    streams: Tensor, kv: Tensor, weight: Tensor, dead: Tensor, out: Tensor, stride: int, eps: float, **_: Any
) -> None:
    out.copy_(ops.engram_inject.implementations[REFERENCE](streams, kv, weight, dead, eps))


def rows(*arguments: Any, **_: Any) -> None:
    *own, out, _tokens, _requests, pad = arguments
    out.copy_(ops.ngram_rows.implementations[REFERENCE](*own, pad))


def _batch(inputs: Tensor, query_start: Tensor, lengths: Tensor, requests: int) -> ops.Batch:
    return ops.Batch(query_start[: requests + 1], lengths[:requests], len(inputs))


def pool(
    inputs: Tensor,
    ring: Tensor,
    table: Tensor,
    start: Tensor,
    lengths: Tensor,
    out: Tensor,
    requests: int,
    *_: Any,
    **__: Any,
) -> None:
    batch, slots = _batch(inputs, start, lengths, requests), inputs.new_full((len(inputs),), -1)  # nothing is kept
    out.copy_(ops.pool_open_groups.implementations[REFERENCE](inputs, ring, table, batch, slots))


def keep(
    inputs: Tensor,
    ring: Tensor,
    table: Tensor,
    start: Tensor,
    lengths: Tensor,
    slots: Tensor,
    requests: int,
    *_: Any,
    **__: Any,
) -> None:
    batch = _batch(inputs, start, lengths, requests)
    ops.pool_open_groups.implementations[REFERENCE](inputs, ring, table, batch, slots)


KERNELS: dict[str, Callable[..., None]] = {f.__name__: f for f in (latents, compressed, inject, rows, pool, keep)}
