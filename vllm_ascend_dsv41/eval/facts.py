"""What can be learnt of a service, its checkpoint and this machine, for the manifest."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from openai import OpenAIError
from safetensors import SafetensorError, safe_open

from ..deploy import fingerprint
from ..deploy.check import Service
from ..deploy.check.drafts import ACCEPTED, DRAFTS
from . import manifest
from .errors import EvalError
from .verdict import STARTED

DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
POSITION = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{[^}]*position="(\d+)"[^}]*\} ([\d.e+]+)$', re.MULTILINE
)
ENCODER = "deepseek_v41_encoding.py"


class Metrics:
    """/metrics at one time. ``several``: the page came from different processes, whose counters cannot be compared."""

    def __init__(self, service: Service) -> None:
        pages = [service.metrics() for _ in range(3)]
        self.values = {name: value for name, value in pages[-1].items() if math.isfinite(value)}
        self.several = len({page.get(STARTED) for page in pages}) > 1
        self.positions: dict[int, float] = {}
        for position, value in POSITION.findall(service.metrics_page()):
            self.positions[int(position)] = self.positions.get(int(position), 0.0) + float(value)


def service_facts(service: Service, metrics: Metrics) -> manifest.Service:
    """Who answers. Raises OpenAIError when the service does not."""
    listed = next((model for model in service.models if model.id == service.model), None)
    extra = (listed.model_extra or {}) if listed is not None else {}
    try:
        version = service.http.get("/version").json()["version"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        version = None
    return manifest.Service(
        url=service.url,
        model=service.model,
        root=extra.get("root"),
        max_model_len=service.longest,
        vllm=version,
        started=metrics.values.get(STARTED),
    )


def checkpoint_facts(path: Path | None) -> manifest.Checkpoint:
    """Digests and formats of a checkpoint that this machine can read. Raises EvalError."""
    if path is None:
        return manifest.Checkpoint()
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        shards = [file for file in path.rglob("*.safetensors") if file.is_file()]
        size = sum(file.stat().st_size for file in shards)
        quantization = config.get("quantization_config") or {}
        weights = quantization.get("model_quant_type") or quantization.get("quant_method") or config.get("dtype")
    except (OSError, ValueError, AttributeError) as error:
        raise EvalError(f"{path}: no checkpoint can be read there ({error}); pass --checkpoint DIR") from error
    return manifest.Checkpoint(
        path=str(path),
        digests=fingerprint.checkpoint(path),
        weights=str(weights),
        engram=_engram_dtype(path),
        shards=len(shards),
        bytes=size,
    )


def _engram_dtype(path: Path) -> str | None:
    try:
        (index,) = path.glob("*.safetensors.index.json")
        places: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        name = next(name for name in places if re.fullmatch(r"(?:model\.)?layers\.\d+\.engram\.embed\.weight", name))
        with safe_open(path / places[name], framework="numpy") as stored:
            return str(stored.get_slice(name).get_dtype())
    except (OSError, ValueError, KeyError, TypeError, StopIteration, SafetensorError):
        return None


def encoder_facts(
    service: Service, checkpoint: manifest.Checkpoint, body: Mapping[str, Any], question: str
) -> manifest.Encoder:
    """One question as the service encodes it with the run's own options; digests of what encodes it."""
    try:
        ids = service.prompt_ids_of(question, extra_body=dict(body)) or None
        text = service.decoded(ids) if ids else None
    except (OpenAIError, httpx.HTTPError, ValueError, KeyError, TypeError):
        ids = text = None
    return manifest.Encoder(
        question=question,
        token_ids=ids,
        text=text,
        module_sha256=_module_digest(),
        tokenizer_sha256=checkpoint.digests.get("tokenizer.json"),
    )


def _module_digest() -> str | None:
    """Of vLLM's encoder, found without importing vLLM."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    module = Path(found.origin).with_name("tokenizers") / ENCODER
    return hashlib.sha256(module.read_bytes()).hexdigest() if module.is_file() else None


def effort_in(text: str | None) -> int | None:
    """The effort that an encoded prompt asks for."""
    found = re.search(r"Reasoning Effort: (\d+)", text or "")
    return int(found.group(1)) if found else None


def draft_facts(before: Metrics, after: Metrics, report: Mapping[str, Any] | None) -> manifest.Draft:
    """What was drafted and accepted between two looks at /metrics."""
    method = str(report["draft"]) if report and "draft" in report else None
    if DRAFTS not in after.values or before.several or after.several:
        return manifest.Draft(method=method)

    def between(name: str) -> int:
        return int(after.values.get(name, 0.0) - before.values.get(name, 0.0))

    drafts, accepted = between(DRAFTS), between(ACCEPTED)
    positions = sorted(after.positions)
    return manifest.Draft(
        method=method or "on",
        drafts=drafts,
        draft_tokens=between(DRAFT_TOKENS),
        accepted_tokens=accepted,
        accepted_per_position=[int(after.positions[at] - before.positions.get(at, 0.0)) for at in positions],
        mean_acceptance_length=round(1 + accepted / drafts, 4) if drafts > 0 else None,
    )


def host_facts() -> dict[str, str]:
    """This machine, on which the benchmark ran."""
    return {"name": socket.gethostname(), "machine": platform.machine(), "python": platform.python_version()}


def startup_report(path: Path | None) -> dict[str, Any] | None:
    """What the server wrote by DSV41_STARTUP_REPORT. Raises EvalError."""
    if path is None:
        return None
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EvalError(f"{path}: no startup report can be read ({error})") from error
    kinds = {"parallel": dict, "engram": list, "versions": dict}
    if not isinstance(report, dict) or not all(isinstance(report.get(name), kind) for name, kind in kinds.items()):
        raise EvalError(f"{path}: no startup report; the server writes one where DSV41_STARTUP_REPORT names a file")
    return report


def server_defaults(path: Path | None) -> dict[str, Any] | None:
    """generation_config.json, from which vLLM takes what a request does not say."""
    try:
        return dict(json.loads((path / "generation_config.json").read_text(encoding="utf-8"))) if path else None
    except (OSError, ValueError, TypeError):
        return None


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p99, max; empty without values."""
    if not values:
        return {}
    at = dict(zip(("p50", "p90", "p99", "max"), np.percentile(values, (50, 90, 99, 100)), strict=True))
    return {name: round(float(value), 6) for name, value in {"mean": np.mean(values), **at}.items()}
