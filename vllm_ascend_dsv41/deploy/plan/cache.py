"""Key-value cache: what a block holds, what a sequence needs. Computed as vLLM 0.30.0 plans it.

vLLM gives one pool of equal blocks to all groups of caches (``kv_cache_utils``, packed groups): a block is as large as
the group that needs most of it, and every group takes whole blocks of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...layer_plan import ModelPlan

OPEN_GROUP_ROWS = 8  # as cache.layers: rings come in multiples of this
SCALE_BYTES = 2


@dataclass(frozen=True)
class Page:
    """Bytes that one cache of one layer takes of a block."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Caches:
    """All caches of a rank, by how they grow: rows of the whole sequence, of its last tokens, of the request."""

    compressed: tuple[Page, ...]
    window: tuple[Page, ...]
    ring: tuple[Page, ...]
    block_size: int
    sliding_window: int

    @classmethod
    def of(
        cls, config: Mapping[str, Any], device: str, block_size: int, draft_tokens: int, row_bytes: int = 2
    ) -> Caches:
        """Of a checkpoint's config; ``row_bytes``: of an element of a row (BF16: 2)."""
        text, plan = config["text_config"], ModelPlan.from_config(config)
        head, index = text["head_dim"], text.get("index_head_dim", 0)
        key_bytes = index + SCALE_BYTES if device == "npu" else index * row_bytes
        compressed, ring = [], []
        rows = -(-(1 + draft_tokens) // OPEN_GROUP_ROWS) * OPEN_GROUP_ROWS
        for layer in plan.trunk:
            if layer.is_kv_source:
                states = block_size // layer.ratio
                compressed.append(Page(f"layer {layer.index} rows", states * head * row_bytes))
                compressed.append(Page(f"layer {layer.index} index keys", states * key_bytes))
                if layer.has_open_group:
                    ring.append(Page(f"layer {layer.index} open group", rows * 2 * head * 4))
        layers = [*plan.trunk, *(plan.draft if draft_tokens else ())]
        window = [Page(f"layer {layer.index} window", block_size * head * row_bytes) for layer in layers]
        return cls(tuple(compressed), tuple(window), tuple(ring), block_size, text["sliding_window"])

    @property
    def token_bytes(self) -> float:
        """Bytes that every further token of a sequence takes for good: compressed rows and index keys."""
        return sum(page.bytes for page in self.compressed) / self.block_size

    @property
    def groups(self) -> Groups:
        """As vLLM packs them into blocks."""
        buckets = [bucket for bucket in (self.window, self.compressed, self.ring) if bucket]
        sizes = [_by_size(bucket) for bucket in buckets]
        balanced = [len(set(size.values())) == 1 for size in sizes]
        mixed = [max(s.values()) for s, even in zip(sizes, balanced, strict=True) if even and len(s) > 1]
        repeats = None
        if mixed:
            even = [max(s.values()) for s, is_even in zip(sizes, balanced, strict=True) if is_even]
            repeats = _least_padding(even, max(mixed))

        def split(bucket: Sequence[Page], size: Mapping[int, int], is_even: bool) -> int:
            """Groups that vLLM's repeating pattern splits a bucket into."""
            return -(-max(size.values()) // repeats) if is_even and repeats else 1

        def is_state(bucket: Sequence[Page]) -> bool:
            return bucket is self.ring or (repeats is None and bucket is self.window)

        anchor = 0
        for bucket, size, even_bucket in zip(buckets, sizes, balanced, strict=True):
            parts = len(bucket) if is_state(bucket) else split(bucket, size, even_bucket)
            anchor = max(anchor, sum(-(-count // parts) * page for page, count in size.items()))
        counts, widest = {}, 0
        for bucket, size, even_bucket in zip(buckets, sizes, balanced, strict=True):
            parts = split(bucket, size, even_bucket)
            if is_state(bucket):
                fit = max(anchor // bucket[0].bytes, 1)
                parts = max(parts, -(-len(bucket) // fit))
            counts["ring" if bucket is self.ring else "window" if bucket is self.window else "compressed"] = parts
            widest = max(widest, sum(-(-count // parts) * page for page, count in size.items()))
        return Groups(widest, counts.get("compressed", 0), counts.get("window", 0), counts.get("ring", 0))


@dataclass(frozen=True)
class Groups:
    """Bytes of a block, and into how many groups each sort of cache is packed."""

    block_bytes: int
    compressed: int
    window: int
    ring: int


def blocks_per_request(caches: Caches, length: int, in_flight: int) -> int:
    """Blocks of the pool that one request of ``length`` tokens needs at most; ``in_flight``: tokens of a step."""
    groups, size = caches.groups, caches.block_size
    window = -(-min(caches.sliding_window - 1 + in_flight, length) // size) + 1
    return groups.compressed * -(-length // size) + groups.window * window + groups.ring


def _by_size(pages: Sequence[Page]) -> dict[int, int]:
    """How many pages there are of each size."""
    counted: dict[int, int] = defaultdict(int)
    for page in pages:
        counted[page.bytes] += 1
    return dict(counted)


def _least_padding(values: Sequence[int], least: int) -> int:
    """The divisor from ``least`` on that leaves the least padding when values are rounded up to its multiples."""
    return min(range(least, max(values) + 1), key=lambda d: (sum(-v % d for v in values), -d), default=least)
