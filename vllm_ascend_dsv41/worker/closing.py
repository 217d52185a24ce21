"""The part of a V1 worker that the start, idle steps and the end of a server need."""

from __future__ import annotations

from typing import Any

from .report import Warnings, collect_warnings, ready


class ClosingWorker:
    """Mixed in front of vLLM's V1 worker, or of one derived from it."""

    model_runner: Any
    _warnings: Warnings

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As upstream; what is warned of from here on is part of the startup report."""
        self._warnings = collect_warnings()
        super().load_model(*args, **kwargs)  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """As upstream; the last thing before a worker serves: it says what it is."""
        taken = super().compile_or_warm_up_model()  # type: ignore[misc]
        ready(self, self._warnings)
        return taken

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
