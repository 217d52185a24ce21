"""The part of a V1 worker that idle steps and the end of a server need."""

from __future__ import annotations

from typing import Any


class ClosingWorker:
    """Mixed in front of vLLM's V1 worker, or of one derived from it."""

    model_runner: Any

    def execute_dummy_batch(self) -> None:
        """As upstream, for a step in which only other data-parallel ranks have requests; they may draft, too."""
        super().execute_dummy_batch()  # type: ignore[misc]
        self.model_runner.draft_idle()

    def shutdown(self) -> None:
        """As upstream, after the Engram tables were given back."""
        runner = getattr(self, "model_runner", None)
        close = getattr(getattr(runner, "model", None), "close", None)
        try:
            if close is not None:  # other models have nothing to close
                close()
        finally:
            super().shutdown()  # type: ignore[misc]
