"""vllm-ascend's V1 worker and model runner with our drafter, caches and Engram history."""

from __future__ import annotations

import sys
from typing import Any

from ..spec_decode.proposer import DSparkProposer
from ..spec_decode.runner import DSparkRunner
from ..upstream import GPUModelRunner, NPUModelRunner, NPUWorker, kernel_warmup
from .closing import ClosingWorker
from .exchange import exchanged
from .lookback import LookbackRunner
from .report import log_operators


class NpuModelRunner(DSparkRunner, LookbackRunner, NPUModelRunner):  # type: ignore[misc]
    """Caches are laid out by vLLM's own planner: vllm-ascend's knows the layouts of its own models."""

    def _get_drafter(self) -> Any:
        """Ours, whose method vllm-ascend does not know."""
        return DSparkProposer(self.vllm_config)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As upstream, saying which operators serve."""
        super().load_model(*args, **kwargs)
        log_operators("npu")

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's: one allocation, blocks of all layers in it. vllm-ascend's patch of what follows in it sets the
        layers' attribute and asks no layer how it reads its part."""
        caches = GPUModelRunner.initialize_kv_cache_tensors(self, *args, **kwargs)
        for name, cache in caches.items():
            self.compilation_config.static_forward_context[name].bind_kv_cache(cache)
        return caches


class NpuWorker(ClosingWorker, NPUWorker):  # type: ignore[misc]
    """Names that upstream's methods look up in their modules are exchanged while they run."""

    def init_device(self) -> None:
        """Initialise as upstream does, with our runner."""
        with exchanged(sys.modules[NPUWorker.__module__], "NPUModelRunner", NpuModelRunner):
            super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        """As upstream, which would compile kernels of its own indexer for this model, and asserts its sizes."""
        with exchanged(sys.modules[kernel_warmup.__module__], "indexer_triton_warmup", lambda worker: None):
            return super().compile_or_warm_up_model()
