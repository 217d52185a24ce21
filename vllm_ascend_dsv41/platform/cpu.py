"""vLLM's CPU platform, with what DeepSeek-V4.1 needs of it."""

from __future__ import annotations

from typing import Any

from ..upstream import CpuPlatform as UpstreamCpuPlatform


class _NotMla:
    """A model config that answers no to ``use_mla`` and is the given one in all else."""

    use_mla = False

    def __init__(self, model_config: Any) -> None:
        self.__dict__["_model_config"] = model_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model_config, name, value)


class UnsupportedOptionError(ValueError):
    """An option that this package refuses, with the reason and the remedy."""


class CpuPlatform(UpstreamCpuPlatform):  # type: ignore[misc]
    """Chosen on machines without accelerator. Other models are served as upstream's platform does."""

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Called before vLLM reads its options: ``--quantization ascend`` must be known by then."""
        from .register import register_quantization

        super().pre_register_and_update(parser)
        register_quantization()

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """As upstream, without its rules for the CPU kernels of other MLA models, which ours does not call:
        blocks of 16 tokens, no chunked prefill, no prefix caching."""
        model = vllm_config.model_config
        if model is None or getattr(model.hf_config, "model_type", None) != "deepseek_v41":
            super().check_and_update_config(vllm_config)
            return
        _refuse(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = "vllm_ascend_dsv41.worker.cpu.CpuWorker"
        vllm_config.model_config = _NotMla(model)
        try:
            super().check_and_update_config(vllm_config)
        finally:
            vllm_config.model_config = model

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Adds the collectives that experts under data parallelism call."""
        return "vllm_ascend_dsv41.worker.cpu_communicator.CpuCommunicator"


def _refuse(vllm_config: Any) -> None:
    """Options that would fail or compute something else."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    ratio = 2  # the largest compression ratio: a block holds whole groups
    refused = [
        (
            vllm_config.model_config.quantization != "ascend",
            "DeepSeek-V4.1 is served from its Ascend conversion here: convert with `dsv41 quantize SRC DST` "
            "and serve DST with --quantization ascend",
        ),
        (vllm_config.speculative_config is not None, "--speculative-config: drafting is not part of this version"),
        (vllm_config.lora_config is not None, "--enable-lora: LoRA is not supported with DeepSeek-V4.1"),
        (
            getattr(parallel, "decode_context_parallel_size", 1) > 1,
            "--decode-context-parallel-size: use tensor, data or expert parallelism",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "--prefill-context-parallel-size: use tensor, data or expert parallelism",
        ),
        (
            cache.cache_dtype not in ("auto", "bfloat16"),
            f"--kv-cache-dtype {cache.cache_dtype}: rows are kept in the model's dtype; leave it at auto",
        ),
        (
            cache.user_specified_block_size and cache.block_size % ratio != 0,
            f"--block-size {cache.block_size}: must be a multiple of {ratio}; 128 is what the guides use",
        ),
    ]
    for condition, message in refused:
        if condition:
            raise UnsupportedOptionError(message)
