"""vllm-ascend's V1 worker and model runner with our drafter, caches and Engram history."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from ..spec_decode.proposer import DSparkProposer
from ..spec_decode.runner import DSparkRunner
from ..upstream import (
    GPUModelRunner,
    NPUModelRunner,
    NPUWorker,
    get_dp_group,
    kernel_warmup,
    set_ascend_forward_context,
)
from .closing import ClosingWorker
from .exchange import exchanged
from .lookback import LookbackRunner
from .report import log_operators

#: As ``spec_decode.runner.HOOKS``, of vllm-ascend 0.30.0's V1 runner.
HOOKS = {
    "_build_attention_metadata": ("num_tokens", "num_reqs", "max_query_len"),
    "_dummy_run": ("num_tokens",),
    "_get_drafter": (),
    "_get_spec_decode_draft_probs": ("spec_decode_metadata",),
    "_input_fits_in_drafter": ("common_attn_metadata",),
    "_model_forward": ("num_tokens_padded", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"),
    "_prepare_lookback_token_ids": ("num_reqs",),
    "_sample": ("logits", "spec_decode_metadata"),
    "capture_model": (),
    "initialize_kv_cache_tensors": ("kv_cache_config", "kernel_block_sizes", "kv_cache_allocation_context"),
    "propose_draft_token_ids": ("valid_sampled_token_ids", "sampling_metadata", "scheduler_output"),
}


class NpuProposer(DSparkProposer):
    """Drafts in vllm-ascend's forward context, which chooses how experts' tokens are exchanged."""

    def forward_context(self, tokens: int) -> Any:
        """Of a pass over so many tokens here; other data-parallel ranks may have more."""
        across = None
        group = get_dp_group()
        if group.world_size > 1:
            across = torch.zeros(group.world_size, dtype=torch.int32)
            across[group.rank_in_group] = tokens
            dist.all_reduce(across, group=group.cpu_group)
        return set_ascend_forward_context(
            None, self.vllm_config, num_tokens=tokens, num_tokens_across_dp=across, model_instance=self._target
        )

    def dummy_run(self, num_tokens: int, is_profile: bool = False, **_: Any) -> None:
        """vllm-ascend's call behind a dummy run of the target: while memory is measured, as many requests draft as may
        come. (Idle steps of data-parallel ranks come through the worker.)"""
        del num_tokens
        if is_profile:
            requests = self.vllm_config.scheduler_config.max_num_seqs
            nothing = torch.zeros(requests, dtype=torch.long)
            drawn = torch.ones(requests, device=self.device) if self.probabilistic else None
            self.propose(nothing, nothing, {}, drawn)


class NpuModelRunner(DSparkRunner, LookbackRunner, NPUModelRunner):  # type: ignore[misc]
    """Caches are laid out by vLLM's own planner: vllm-ascend's knows the layouts of its own models."""

    hooks, upstream = HOOKS, "vllm_ascend"
    _capturing = 0

    def _get_drafter(self) -> Any:
        """Ours, whose method vllm-ascend does not know."""
        return NpuProposer(self.vllm_config)

    def propose_draft_token_ids(  # type: ignore[override]
        self, valid_sampled_token_ids: Any, sampling_metadata: Any, scheduler_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """vllm-ascend's order of arguments."""
        if self.drafts:
            return self.draft_tokens(scheduler_output, valid_sampled_token_ids, sampling_metadata)
        return NPUModelRunner.propose_draft_token_ids(
            self, valid_sampled_token_ids, sampling_metadata, scheduler_output, *args, **kwargs
        )

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream; dummy runs, captures among them, have no earlier tokens, but the same buffer."""
        if self.lookback_token_ids is not None:
            kwargs.setdefault("lookback_token_ids", self.lookback_token_ids.gpu)
        return super()._model_forward(*self._with_embeddings(args), **kwargs)

    def _with_embeddings(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments of ``_model_forward``. vllm-ascend's dummy runs give ids alone to a model that wants them beside
        the embeddings; a graph captured so would embed the ids again, also those of pictures."""
        tokens, *rest = args
        if self.supports_mm_inputs and len(rest) == 4 and rest[3] is None:
            rest[3] = self.inputs_embeds.gpu[:tokens]
        return tokens, *rest

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As upstream, saying which operators serve. Raises RuntimeError for vllm-ascend's own DeepSeek-V4.1."""
        super().load_model(*args, **kwargs)
        model = type(self.get_model())
        if model.__module__.startswith("vllm_ascend.models.deepseek_v41"):
            raise RuntimeError(
                f"vLLM built {model.__module__}.{model.__name__}: vllm-ascend's plugin ascend_model was loaded behind "
                "dsv41; leave ascend_model out of VLLM_PLUGINS, as `dsv41 serve` does"
            )
        log_operators("npu")

    def _dummy_run(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """As upstream, remembering the size for what a failed capture says."""
        self._capturing = num_tokens
        return super()._dummy_run(num_tokens, *args, **kwargs)

    def capture_model(self) -> int:
        """As upstream. Raises GraphCaptureError."""
        try:
            captured: int = super().capture_model()
        except Exception as error:
            raise GraphCaptureError(_what_failed(self, self._capturing)) from error
        return captured

    def initialize_kv_cache_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's: one allocation, blocks of all layers in it. vllm-ascend's patch of what follows in it sets the
        layers' attribute and asks no layer how it reads its part."""
        caches = GPUModelRunner.initialize_kv_cache_tensors(self, *args, **kwargs)
        for name, cache in caches.items():
            self.compilation_config.static_forward_context[name].bind_kv_cache(cache)
        return caches


class GraphCaptureError(RuntimeError):
    """A decode step could not be captured: its size, the memory at that moment, and what to change."""


def _what_failed(runner: Any, tokens: int) -> str:
    npu: Any = torch.get_device_module("npu")
    free, total = (value / 2**30 for value in npu.mem_get_info())
    sizes = runner.vllm_config.compilation_config.cudagraph_capture_sizes
    return (
        f"the decode graph of {tokens} tokens could not be captured; {free:.2f} of {total:.2f} GiB of device memory "
        f"were free. Sizes asked for: {sizes}. Less memory is taken by fewer sizes (--compilation-config "
        "'{\"cudagraph_capture_sizes\": [...]}'), a smaller --max-num-seqs or a smaller --gpu-memory-utilization, "
        "which leaves more beside the cache; --enforce-eager serves without graphs"
    )


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
