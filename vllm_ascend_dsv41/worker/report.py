"""What a worker says of itself: its operators when the model is loaded, and one table when it is ready to serve."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..ops import overrides, report
from ..spec_decode.options import drafts_with_dspark
from ..upstream import get_kv_cache_capacity, init_logger
from ..versions import versions

logger = init_logger("vllm.dsv41")

FILE = "DSV41_STARTUP_REPORT"  # environment variable: where the table goes as JSON; replicas after the first add .dpN


class Warnings(logging.Handler):
    """Collects what this package and vLLM warn of in this process while it starts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """As logging.Handler."""
        try:
            text = " ".join(record.getMessage().split())
        except Exception:  # as logging's own handlers: a wrong call elsewhere must not end the start
            self.handleError(record)
            return
        if text not in self.texts:
            self.texts.append(text)


def collect_warnings() -> Warnings:
    """From now on; ``ready`` ends it, or the next call."""
    logger_of_vllm = logging.getLogger("vllm")
    for old in [handler for handler in logger_of_vllm.handlers if isinstance(handler, Warnings)]:
        logger_of_vllm.removeHandler(old)
    handler = Warnings()
    logger_of_vllm.addHandler(handler)
    return handler


def log_operators(device_type: str) -> None:
    """One line: which implementation serves each operator."""
    served = ", ".join(f"{name}={implementation}" for name, implementation in report(device_type).items())
    logger.info("operators: %s", served)


def facts(worker: Any, warnings: list[str]) -> dict[str, Any]:
    """What the first rank of a replica knows when it is ready."""
    config, runner = worker.vllm_config, worker.model_runner
    model, cache, parallel = runner.get_model(), runner.kv_cache_config, config.parallel_config
    device = next(model.parameters()).device.type
    tokens, concurrency = get_kv_cache_capacity(config, cache)
    compilation = config.compilation_config
    graphs = getattr(compilation.cudagraph_mode, "name", str(compilation.cudagraph_mode))
    engram = getattr(getattr(model, "model", None), "engram", None)
    speculative = config.speculative_config
    return {
        "schema": 1,
        "model": config.model_config.model,
        "served_as": config.model_config.served_model_name,
        "quantization": config.model_config.quantization,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "versions": versions(),
        "parallel": {
            "data": parallel.data_parallel_size,
            "data_rank": parallel.data_parallel_rank,
            "tensor": parallel.tensor_parallel_size,
            "experts_divided": bool(parallel.enable_expert_parallel),
        },
        "weight_bytes_of_a_rank": sum(p.numel() * p.element_size() for p in model.parameters()),
        "engram": engram.tables.report() if engram is not None else [],
        "images": _images(model),
        "cache": {
            "blocks": cache.num_blocks,
            "tokens_at_max_model_len": tokens,
            "sequences_at_max_model_len": round(concurrency, 2),
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        },
        "graphs": {
            "mode": graphs,
            "sizes": [] if graphs == "NONE" else list(compilation.cudagraph_capture_sizes or []),
        },
        "draft": f"DSpark, {speculative.num_speculative_tokens} tokens" if drafts_with_dspark(speculative) else "none",
        "operators": _by_implementation(report(device)),
        "operators_exchanged": sorted(overrides()),
        "warnings": warnings,
    }


def _images(model: Any) -> dict[str, Any]:
    """Whether pictures are taken, and the bytes of the vision tower on this rank, or those that were saved."""
    tower = getattr(model, "images", None)
    if tower is not None:
        return {"taken": True, "tower_bytes_of_a_rank": sum(p.numel() * p.element_size() for p in tower.parameters())}
    locations = getattr(getattr(model, "checkpoint", None), "locations", {})
    saved = sum(place.bytes for key, place in locations.items() if re.match(r"vision\.|aligner\.|image_", key))
    return {"taken": False, "bytes_not_loaded": saved}


def _by_implementation(served: Mapping[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, implementation in served.items():
        grouped.setdefault(implementation, []).append(name)
    return grouped


def table(found: Mapping[str, Any]) -> str:
    """As a table of two columns."""
    lines = []
    for name, value in found.items():
        if name == "schema" or (name == "operators_exchanged" and not value):
            continue
        if isinstance(value, Mapping):
            texts = [f"{key.replace('_', ' ')}: {_said(item)}" for key, item in value.items()]
            if name != "operators":
                texts = [", ".join(texts)]
        elif isinstance(value, list):
            texts = [str(item) for item in value] or ["none"]
        else:
            texts = [_said(value)]
        for number, text in enumerate(texts):
            lines.append(f"  {name.replace('_', ' ') if number == 0 else '':<26}{text}")
    return "\n".join(lines)


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if type(value) is int else str(value)


def ready(worker: Any, warnings: Warnings) -> None:
    """Say the table once per replica, by its first rank; write it where ``DSV41_STARTUP_REPORT`` says."""
    logging.getLogger("vllm").removeHandler(warnings)
    if worker.rank % worker.vllm_config.parallel_config.world_size:
        return
    try:
        found = facts(worker, warnings.texts)
        logger.info("ready to serve:\n%s", table(found))
        path = os.environ.get(FILE)
        if path:
            _write(found, path)
    except Exception as error:  # a server that can serve must not end for a report
        logger.warning(
            "the startup report failed (%s: %s); %s=%s", type(error).__name__, error, FILE, os.environ.get(FILE)
        )


def _write(found: Mapping[str, Any], path: str) -> None:
    replica = found["parallel"]["data_rank"]
    target = Path(f"{path}.dp{replica}" if replica else path)
    partial = target.with_name(f".{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
        partial.replace(target)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
