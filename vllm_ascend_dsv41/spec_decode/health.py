"""Watches whether drafts are accepted: a draft that never is costs speed and says nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import prometheus_client

from ..upstream import StatLoggerBase, init_logger
from .options import drafts_with_dspark

logger = init_logger("vllm.dsv41")

WINDOW = 1000  # verified drafts that are judged together
STUCK_BELOW = 1.005  # mean acceptance length that is printed as 1.00


class DraftHealth:
    """Mean acceptance length (accepted tokens and the one that is always gained) over the last ``window`` drafts."""

    def __init__(self, window: int = WINDOW) -> None:
        self.window, self.drafts, self.accepted = window, 0, 0
        self.stuck = False

    def observe(self, drafts: int, accepted: int) -> float | None:
        """Count verified drafts. Returns the mean acceptance length when a window is full, else None."""
        self.drafts, self.accepted = self.drafts + drafts, self.accepted + accepted
        if self.drafts < self.window:
            return None
        length = 1 + self.accepted / self.drafts
        self.drafts = self.accepted = 0
        self.stuck = length < STUCK_BELOW
        return length


@cache
def _gauge() -> prometheus_client.Gauge:
    return prometheus_client.Gauge(
        "dsv41:draft_stuck",
        f"1 while the last {WINDOW} drafts had a mean acceptance length of 1.00.",
        ["model_name", "engine"],
        multiprocess_mode="mostrecent",
    )


class DraftHealthLogger(StatLoggerBase):  # type: ignore[misc]
    """Entry point ``vllm.stat_logger_plugins``: made for every engine of a server; idle unless DSpark drafts."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.engine_index, self._health, self._reported = engine_index, None, False
        if drafts_with_dspark(vllm_config.speculative_config):
            self._health = DraftHealth()
            name = vllm_config.model_config.served_model_name
            self._gauge = _gauge().labels(name, str(engine_index))
            self._gauge.set(0)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """vLLM's call after every step."""
        stats = getattr(scheduler_stats, "spec_decoding_stats", None)
        if self._health is None or stats is None:
            return
        length = self._health.observe(stats.num_drafts, stats.num_accepted_tokens)
        if length is None:
            return
        self._gauge.set(int(self._health.stuck))
        if self._health.stuck and not self._reported:
            self._reported = True  # once: the gauge says whether it lasts
            logger.error(
                "engine %d: the draft is stuck: mean acceptance length %.2f over %d drafts. The text is right, but "
                "every draft is wasted. Usual causes: the checkpoint's mtp tensors are from another conversion, or "
                "rotated like the trunk; check with `dsv41 verify`, or serve without --speculative-config",
                self.engine_index,
                length,
                self._health.window,
            )

    def log_engine_initialized(self) -> None:
        """vLLM's call; nothing to say."""
