"""vllm-ascend's platform, with what DeepSeek-V4.1 needs of it."""

from __future__ import annotations

import logging
import os
from typing import Any

from ..ops import overrides
from ..ops.registry import OVERRIDES
from ..spec_decode.options import accept
from ..upstream import NPUPlatform
from .kernel_sizes import outside
from .refusals import refuse, refuse_first, serves

logger = logging.getLogger(__name__)

BLOCK_SIZES = (32, 64, 128)  # tokens of a block that the attention kernel's pages may hold
#: Of vllm-ascend's --additional-config: what changes the path of the model and was not built for it.
NOT_OURS = (
    "enable_dsa_cp",
    "enable_flashcomm1",
    "enable_force_eplb",
    "enable_fused_mc2",
    "enable_kvpp",
    "enable_shared_expert_dp",
    "finegrained_tp_config",
    "mix_placement",
    "multistream_engram_overlap",
    "multistream_overlap_shared_expert",
    "profiling_chunk_config",
    "recompute_scheduler_enable",
    "rl_config",
    "sparse_kv_offload_config",
    "xlite_graph_config",
)
FLASHCOMM = "VLLM_ASCEND_ENABLE_FLASHCOMM1"
#: Operators whose weights vllm-ascend's code reads, too, in the layout of the kernels.
FIXED = ("moe_float", "moe_w8a8", "quantize_per_token", "swiglu", "w8a8_matmul")


class NpuPlatform(NPUPlatform):  # type: ignore[misc]
    """Chosen where torch_npu sees a device. Other models go the way of vllm-ascend's platform, but its own quantisation
    method ``ascend`` and its models are not there: servers of other models leave this plugin out of VLLM_PLUGINS."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Called before vLLM reads its options. vllm-ascend names its own quantisation method ``ascend`` here: ours
        takes its place."""
        from .register import register_quantization

        super().pre_register_and_update(parser)
        register_quantization(on_npu=True)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As vllm-ascend, with our worker, drafter and graph mode."""
        if not serves(vllm_config.model_config):
            super().check_and_update_config(vllm_config)
            return
        refuse(vllm_config)
        _refuse(vllm_config)
        accept(vllm_config)
        sizes = outside(vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size)
        if sizes:
            logger.warning("sizes that kernels of A2 and A3 refuse, as far as their source says: %s", "; ".join(sizes))
        vllm_config.scheduler_config.async_scheduling = False  # Engram looks back at generated tokens, on the host
        _keep_own_options(vllm_config)
        _choose_graphs(vllm_config)
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.worker_cls = "vllm_ascend_dsv41.worker.npu.NpuWorker"

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Layers have several caches, which find their memory by name and not by the layer's number."""


def _refuse(vllm_config: Any) -> None:
    """Beyond what is refused on every device."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    additional = vllm_config.additional_config or {}
    eplb = additional.get("eplb_config") or {}
    foreign = [name for name in NOT_OURS if additional.get(name)]
    exchanged = overrides()
    fixed = [name for name in FIXED if name in exchanged]
    worker = parallel.worker_cls
    refuse_first(
        [
            (
                parallel.pipeline_parallel_size > 1,
                f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: use tensor, data or expert parallelism",
            ),
            (
                bool(vllm_config.use_v2_model_runner),
                "model runner V2: drafts and Engram history are built for V1; set VLLM_USE_V2_MODEL_RUNNER=0",
            ),
            (
                bool(parallel.enable_eplb or eplb.get("dynamic_eplb") or eplb.get("expert_map_path")),
                "--enable-eplb, eplb_config: experts stay where the checkpoint's order puts them; leave it out",
            ),
            (
                bool(foreign),
                f"--additional-config, {', '.join(foreign)}: changes how other models are divided or captured; not "
                "built for DeepSeek-V4.1 here; leave it out",
            ),
            (
                os.environ.get(FLASHCOMM, "0") not in ("", "0"),
                f"{FLASHCOMM}: sequence parallelism is not built for DeepSeek-V4.1 here; unset it",
            ),
            (
                bool(fixed),
                f"{OVERRIDES}: {', '.join(fixed)}: on NPUs vllm-ascend's experts read the same weights; others can be "
                "exchanged",
            ),
            (
                bool(exchanged) and not vllm_config.model_config.enforce_eager,
                f"{OVERRIDES}: references read the device from the host, which a graph does not allow; add "
                "--enforce-eager",
            ),
            (
                bool(vllm_config.model_config.enable_sleep_mode),
                "--enable-sleep-mode: weights are brought into the kernels' layout once, when they are loaded; leave "
                "it out",
            ),
            (
                bool(vllm_config.engram_config) and vllm_config.engram_config.embedding_across_dp,
                "--engram-config, embedding_across_dp: not on NPUs, where vllm-ascend has no collectives of unequal "
                "sizes; use dp_shared_memory, one copy per node",
            ),
            (
                cache.user_specified_block_size and cache.block_size not in BLOCK_SIZES,
                f"--block-size {cache.block_size}: the attention kernel's pages hold {BLOCK_SIZES} tokens; use 128",
            ),
            (
                parallel.distributed_executor_backend == "external_launcher",
                "--distributed-executor-backend external_launcher: its idle steps pass by the draft, and ranks would "
                "wait for each other; use mp",
            ),
            (
                worker not in ("auto", "vllm_ascend_dsv41.worker.npu.NpuWorker"),
                f"--worker-cls {worker}: the model needs this package's worker; leave it out",
            ),
        ]
    )


def _keep_own_options(vllm_config: Any) -> None:
    """vllm-ascend refuses keys of --additional-config that it does not know, in every process: ours move to the Engram
    config, which vLLM hands on."""
    additional = dict(vllm_config.additional_config or {})
    own = additional.pop("dsv41", None)
    if own is not None and vllm_config.engram_config is not None:
        vllm_config.engram_config.own = own
    vllm_config.additional_config = additional


def _choose_graphs(vllm_config: Any) -> None:
    """FULL_DECODE_ONLY without compilation, or none: prefill and drafts run eagerly."""
    from ..upstream import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    if vllm_config.model_config.enforce_eager:
        mode = CUDAGraphMode.NONE
    elif mode in (None, CUDAGraphMode.FULL_AND_PIECEWISE):  # vLLM's default, which asks for compilation
        mode = CUDAGraphMode.FULL_DECODE_ONLY
    allowed = (CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)
    refuse_first(
        [
            (
                mode not in allowed,
                f"--compilation-config, cudagraph_mode {getattr(mode, 'name', mode)}: decode steps are captured whole "
                "and prefill runs eagerly; use FULL_DECODE_ONLY, or NONE",
            )
        ]
    )
    compilation.cudagraph_mode = mode
    compilation.mode = CompilationMode.NONE
