"""vLLM's V1 worker and model runner on CPU, with the token ids that Engram looks back at."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..ops import report
from ..spec_decode.runner import DSparkRunner
from ..upstream import CPUModelRunner, CPUWorker, cpu_worker, init_logger

logger = init_logger("vllm.dsv41")


class CpuModelRunner(DSparkRunner, CPUModelRunner):  # type: ignore[misc]
    """Hands the model the ids before each request's first scheduled token, wherever the prompt was split."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """As upstream, then the lookback buffer, which upstream's CPU runner does not make."""
        super().load_model(load_dummy_weights)
        served = ", ".join(f"{name}={implementation}" for name, implementation in report("cpu").items())
        logger.info("operators: %s", served)
        depth = getattr(self.model, "token_lookback_depth", 0)
        if depth:
            self.lookback_token_ids = self._make_buffer(self.max_num_reqs, depth, dtype=torch.int32)

    def _prepare_lookback_token_ids(self, num_reqs: int) -> torch.Tensor:
        """[max requests, depth] int32, newest first, -1 before the text. Generated ids are included: without
        asynchronous scheduling, which the CPU platform turns off, the runner knows them all."""
        buffer = self.lookback_token_ids
        buffer.np.fill(-1)
        if num_reqs:
            batch = self.input_batch
            position = batch.num_computed_tokens_cpu[:num_reqs, None] - np.arange(1, buffer.np.shape[1] + 1)
            ids = batch.token_ids_cpu[np.arange(num_reqs)[:, None], position.clip(0)]
            buffer.np[:num_reqs] = np.where(position >= 0, ids, -1)
        return buffer.copy_to_gpu()

    # A request's random generator advances only when its token is used. Upstream takes the draw for an unfinished
    # prompt back by moving the generator's offset, which CPU generators do not have: one such request would end the
    # server. Here their state is kept before sampling and put back.

    def _unfinished_generators(self) -> dict[int, torch.Generator]:
        """Seeded requests of this step whose sampled token is discarded, by row."""
        discarded = self.discard_request_mask.np[: self.input_batch.num_reqs]
        return {row: gen for row, gen in self.input_batch.generators.items() if discarded[row]}

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """As upstream, leaving the generators of unfinished prompts where they were."""
        states = {generator: generator.get_state() for generator in self._unfinished_generators().values()}
        try:
            return super()._sample(logits, spec_decode_metadata)
        finally:
            for generator, state in states.items():
                generator.set_state(state)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, which must not find the generators that it would move."""
        generators, hidden = self.input_batch.generators, self._unfinished_generators()
        for row in hidden:
            del generators[row]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(hidden)


class CpuWorker(CPUWorker):  # type: ignore[misc]
    """Builds our runner: upstream's ``init_device`` takes the class from its module, where the name is exchanged."""

    def init_device(self) -> Any:
        """Initialise as upstream does, with our runner."""
        upstream = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = CpuModelRunner
        try:
            return super().init_device()
        finally:
            cpu_worker.CPUModelRunner = upstream

    def execute_dummy_batch(self) -> None:
        """As upstream, for a step in which only other data-parallel ranks have requests; they may draft, too."""
        super().execute_dummy_batch()
        self.model_runner.draft_idle()

    def shutdown(self) -> None:
        """As upstream, after the Engram tables were given back."""
        close = getattr(getattr(getattr(self, "model_runner", None), "model", None), "close", None)
        try:
            if close is not None:  # other models have nothing to close
                close()
        finally:
            super().shutdown()
