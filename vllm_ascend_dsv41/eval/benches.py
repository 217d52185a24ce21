"""AISBench and ``vllm bench serve`` at one concurrency: what they ask, and what they say they measured."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import aisbench, configs, datasets
from .aisbench import AISBench


@dataclass(frozen=True)
class Ask:
    """One level: each of ``prompts`` once, ``concurrency`` at a time, ``limit`` tokens of answer at most, from ``url``,
    which is the relay's. Files go to ``place``."""

    url: str
    port: int
    model: str
    body: Mapping[str, Any]
    prompts: Sequence[str]
    limit: int
    concurrency: int
    ignore_eos: bool
    tokenizer: Path
    place: Path


def ask_aisbench(bench: AISBench, ask: Ask) -> dict[str, float]:
    """Seconds, tokens per second and answers as AISBench counts them; nothing if it wrote nothing."""
    settings, questions = ask.place / "config", ask.place / "prompts.jsonl"
    questions.write_text("".join(json.dumps({"question": one, "answer": "-"}) + "\n" for one in ask.prompts))
    body = {**ask.body, **({"ignore_eos": True} if ask.ignore_eos else {})}
    configs.write_model(settings, ask.port, ask.model, body, ask.limit, ask.concurrency, ask.tokenizer)
    configs.write_jsonl(settings, "prompts", questions)
    arguments = ["--models", configs.MODEL, "--datasets", datasets.JSONL_CONFIG, "--config-dir", str(settings)]
    arguments += ["--mode", "perf", "--debug", "--num-warmups", "0", "--num-prompts", str(len(ask.prompts))]
    aisbench.run(bench, [*arguments, "--work-dir", str(ask.place / "aisbench")], ask.place / "aisbench.log", {})
    try:
        (folder,) = (ask.place / "aisbench").glob(f"*/performances/{configs.MODEL}")
        told = json.loads((folder / "prompts.json").read_text())
        rows = {row["Performance Parameters"]: row for row in csv.DictReader((folder / "prompts.csv").open())}
        return {
            "completed": float(told["Success Requests"]["total"]),
            "output_throughput": _number(told["Output Token Throughput"]["total"]),
            "mean_ttft": _number(rows["TTFT"]["Average"]) / 1000,
            "mean_tpot": _number(rows["TPOT"]["Average"]) / 1000,
            "mean_e2el": _number(rows["E2EL"]["Average"]) / 1000,
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _number(text: str) -> float:
    """``"184.3586 token/s"``, ``"29.3 ms"``."""
    return float(str(text).split()[0])


def ask_vllm(ask: Ask) -> dict[str, float]:
    """As ``ask_aisbench``, by vLLM's benchmark in a process of its own."""
    prompts, result = ask.place / "prompts.jsonl", ask.place / "result.json"
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in ask.prompts))
    command = [sys.executable, "-m", f"{__package__}.vllm_bench", "--backend", "openai-chat"]
    command += ["--endpoint", "/v1/chat/completions", "--base-url", ask.url, "--model", ask.model]
    command += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(len(ask.prompts))]
    command += ["--max-concurrency", str(ask.concurrency), "--tokenizer", str(ask.tokenizer), "--skip-chat-template"]
    command += ["--custom-output-len", str(ask.limit), "--disable-shuffle", "--no-oversample", "--disable-tqdm"]
    command += ["--extra-body", json.dumps(dict(ask.body)), "--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--ready-check-timeout-sec", "0", "--save-result", "--result-dir", str(ask.place)]
    command += ["--result-filename", result.name, *(["--ignore-eos"] if ask.ignore_eos else [])]
    kept = aisbench.environment({"VLLM_LOGGING_LEVEL": "ERROR"})
    with (ask.place / "vllm.log").open("wb") as log:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=kept)
    try:
        told = json.loads(result.read_text())
        return {
            "completed": float(told["completed"]),
            "output_throughput": float(told["output_throughput"]),
            **{f"mean_{name}": float(told[f"mean_{name}_ms"]) / 1000 for name in ("ttft", "tpot", "e2el")},
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
