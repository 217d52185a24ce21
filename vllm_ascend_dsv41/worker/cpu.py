"""vLLM's V1 worker and model runner on CPU, with the token ids that Engram looks back at."""

from __future__ import annotations

from typing import Any

import torch

from ..spec_decode.runner import DSparkRunner
from ..upstream import CPUModelRunner, CPUWorker, cpu_worker
from .closing import ClosingWorker
from .exchange import exchanged
from .lookback import LookbackRunner
from .report import log_operators


class CpuModelRunner(DSparkRunner, LookbackRunner, CPUModelRunner):  # type: ignore[misc]
    """The runner of every device's model, with generators that a CPU's need."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """As upstream, saying which operators serve."""
        super().load_model(load_dummy_weights)
        log_operators("cpu")

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


class CpuWorker(ClosingWorker, CPUWorker):  # type: ignore[misc]
    """Builds our runner: upstream's ``init_device`` takes the class from its module, where the name is exchanged."""

    def init_device(self) -> Any:
        """Initialise as upstream does, with our runner."""
        with exchanged(cpu_worker, "CPUModelRunner", CpuModelRunner):
            return super().init_device()
