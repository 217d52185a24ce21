"""Options that cannot be honoured on any device: refused before workers start, with the reason and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..engram import EngramOptions, check_columns


class UnsupportedOptionError(ValueError):
    """An option that this package refuses, with the reason and the remedy."""


def serves(model_config: Any) -> bool:
    """Whether the model is ours; others are served as upstream's platform does."""
    return model_config is not None and getattr(model_config.hf_config, "model_type", None) == "deepseek_v41"


def refuse_first(refused: Iterable[tuple[bool, str]]) -> None:
    """Raise UnsupportedOptionError with the message of the first condition that holds."""
    for condition, message in refused:
        if condition:
            raise UnsupportedOptionError(message)


def refuse(vllm_config: Any) -> None:
    """Options known to fail later, or to be ignored or to compute something else."""
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    ratio = 2  # the largest compression ratio: a block holds whole groups
    images = model.multimodal_config
    row_dtypes = ("auto", str(model.dtype).removeprefix("torch."))
    refused = [
        (
            model.quantization != "ascend",
            "DeepSeek-V4.1 is served from its Ascend conversion here: convert with `dsv41 quantize SRC DST` "
            "and serve DST with --quantization ascend",
        ),
        (
            model.runner_type != "generate",
            f"--runner {model.runner_type}: DeepSeek-V4.1 generates text; leave the option out",
        ),
        (vllm_config.load_config.load_format == "dummy", "--load-format dummy: random weights; name a real checkpoint"),
        (vllm_config.lora_config is not None, "--enable-lora: LoRA is not supported with DeepSeek-V4.1"),
        (
            model.enable_prompt_embeds,
            "--enable-prompt-embeds: Engram hashes token ids, which embeddings do not have; send token ids",
        ),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "--decode-context-parallel-size: use tensor, data or expert parallelism",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "--prefill-context-parallel-size: use tensor, data or expert parallelism",
        ),
        (
            cache.cache_dtype not in row_dtypes,
            f"--kv-cache-dtype {cache.cache_dtype}: rows are kept in the model's dtype; leave it at auto",
        ),
        (
            bool(getattr(cache, "kv_offloading_size", None)) or vllm_config.kv_transfer_config is not None,
            "--kv-offloading-size, --kv-transfer-config: the compressor's open groups cannot be moved; leave them out",
        ),
        (
            images is not None and images.language_model_only and images.mm_encoder_tp_mode == "data",
            "--language-model-only with --mm-encoder-tp-mode data: one leaves the vision tower out and the other says "
            "how it is divided; leave one of them out",
        ),
        (
            images is not None and images.enable_mm_embeds,
            "--enable-mm-embeds: embeddings made elsewhere have no start, newline and end of their span; send pictures",
        ),
        (
            bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
            "--disable-hybrid-kv-cache-manager: the model has caches of several kinds; leave the option out",
        ),
        (
            cache.user_specified_block_size and cache.block_size % ratio != 0,
            f"--block-size {cache.block_size}: must be a multiple of {ratio}; 128 is what the guides use",
        ),
    ]
    refuse_first(refused)
    _refuse_tensor_parallel_size(model.hf_config, parallel.tensor_parallel_size)
    _refuse_engram_options(vllm_config)


def _refuse_engram_options(vllm_config: Any) -> None:
    """Before workers start: what the options say, and how they divide the hash columns."""
    parallel = vllm_config.parallel_config
    engram = EngramOptions.of(vllm_config.engram_config, vllm_config.additional_config)
    if engram.embedding_across_dp:
        ranks = parallel.tensor_parallel_size * parallel.data_parallel_size_local
        check_columns(_engram_columns(vllm_config.model_config.hf_config), ranks)


def _engram_columns(config: Any) -> int:
    return int((getattr(config, "engram_max_ngram_size", 1) - 1) * getattr(config, "engram_n_heads", 0))


def _refuse_tensor_parallel_size(config: Any, ranks: int) -> None:
    """Whatever tensor parallelism splits must be divisible: said once, before workers start."""
    columns = _engram_columns(config)
    split = {
        "num_attention_heads": config.num_attention_heads,
        "o_groups": config.o_groups,
        "moe_intermediate_size": config.moe_intermediate_size,
        "(hc_mult + 1) * hidden_size": (config.hc_mult + 1) * config.hidden_size if columns else 0,
    }
    for name, value in split.items():
        if value % ranks:
            raise UnsupportedOptionError(f"--tensor-parallel-size {ranks}: must divide {name} = {value}")
    check_columns(columns, ranks)
