"""vLLM's CPU platform, with what DeepSeek-V4.1 needs of it."""

from __future__ import annotations

from typing import Any

from ..spec_decode.options import accept
from ..upstream import CpuPlatform as UpstreamCpuPlatform
from .refusals import refuse, serves


class _NotMla:
    """A model config that answers no to ``use_mla`` and is the given one in all else."""

    use_mla = False

    def __init__(self, model_config: Any) -> None:
        self.__dict__["_model_config"] = model_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model_config, name, value)


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
        if not serves(model):
            super().check_and_update_config(vllm_config)
            return
        refuse(vllm_config)
        accept(vllm_config)
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
