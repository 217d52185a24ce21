"""Latent rows, pooled and on their way into paged caches: Triton-Ascend kernels."""

from __future__ import annotations

from ..compressor import pool_open_groups
from ..compressor_triton import pool_open_groups_npu
from ..latents import store_compressed, store_latents
from ..latents_triton import store_compressed_npu, store_latents_npu

store_latents.register("npu")(store_latents_npu)
store_compressed.register("npu")(store_compressed_npu)
pool_open_groups.register("npu")(pool_open_groups_npu)
