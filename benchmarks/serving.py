"""Prefill and decode speed of the ``bench`` checkpoint through vLLM on CPU, W8A8 beside BF16, with a profile.

    python benchmarks/serving.py --work DIR [--profile] [--weights w8a8 bf16] [--dtype bfloat16]

One process, greedy, random prompts, no prefix caching. Prefill: time of a step that computes whole
prompts. Decode: steps of one token per request. The profile lists the operators of this package by
their own share of the wall time of the model's forward passes, then everything else.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch

from vllm_ascend_dsv41.ops import operators
from vllm_ascend_dsv41.ops.registry import Operator
from vllm_ascend_dsv41.quant import Weights, convert
from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes, write_checkpoint


class OperatorTimes:
    """Seconds spent in every operator, without the operators it calls itself."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner: list[float] = []

    def install(self) -> None:
        """Wrap the call of every operator."""
        right = Operator.__call__

        def timed(op: Operator[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return right(op, *args, **kwargs)
            finally:
                total = time.perf_counter() - start
                self.seconds[op.name] += total - self._inner.pop()
                self.calls[op.name] += 1
                if self._inner:
                    self._inner[-1] += total

        Operator.__call__ = timed  # type: ignore[method-assign]

    def reset(self) -> None:
        """Start counting again."""
        self.seconds.clear()
        self.calls.clear()


class Bench:
    """One engine and its clock."""

    def __init__(self, model: Path, dtype: str, batch: int, budget: int, length: int, profile: OperatorTimes | None):
        from vllm import LLM

        self.llm = LLM(
            model=str(model),
            quantization="ascend",
            tokenizer_mode="deepseek_v41",
            dtype=dtype,
            block_size=128,
            enforce_eager=True,
            max_model_len=length,
            max_num_seqs=batch,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )
        self.core, self.profile = self.llm.llm_engine, profile
        self.random = random.Random(0)
        self.results: list[dict[str, Any]] = []
        self.title = "first touch"

    def _prompt(self, length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [self.random.randrange(3, 8000) for _ in range(length)]}

    def _report(self, title: str, tokens: int, seconds: float) -> dict[str, Any]:
        result: dict[str, Any] = {"what": title, "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}
        print(f"{title:34} {tokens:6} tokens {seconds:8.2f} s {tokens / seconds:9.1f} tokens/s", flush=True)
        if self.profile is not None:
            top = sorted(self.profile.seconds.items(), key=lambda item: -item[1])
            shares = {name: round(value / seconds, 3) for name, value in top[:8]}
            shares["outside operators"] = round(1 - sum(self.profile.seconds.values()) / seconds, 3)
            result["shares"] = shares
            for name, share in shares.items():
                print(f"    {share:6.1%}  {name} ({self.profile.calls.get(name, 0)} calls)")
        return result

    def _run(self, requests: int, length: int, tokens: int) -> tuple[float, float]:
        """Seconds until every request has its first token, and seconds for the rest."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for number in range(requests):
            self.core.add_request(f"{time.monotonic_ns()}-{number}", self._prompt(length), sampling)
        if self.profile is not None:
            self.profile.reset()
        start, first = time.perf_counter(), None
        waiting = requests
        while self.core.has_unfinished_requests():
            for output in self.core.step():
                waiting -= len(output.outputs[0].token_ids) == 1
            if not waiting and first is None:
                first = time.perf_counter()
                self.after_prefill(requests * length, first - start)
        return (first or start) - start, time.perf_counter() - (first or start)

    def after_prefill(self, tokens: int, seconds: float) -> None:
        """Called between prefill and decode."""
        self.results.append(self._report(self.title + " prefill", tokens, seconds))
        if self.profile is not None:
            self.profile.reset()

    def measure(self, requests: int, length: int, tokens: int) -> list[dict[str, Any]]:
        """Prefill of ``requests`` prompts of ``length``, then ``tokens`` decode steps of all of them."""
        self.results, self.title = [], f"{requests} x {length}"
        _, seconds = self._run(requests, length, tokens)
        self.results.append(self._report(self.title + " decode", requests * (tokens - 1), seconds))
        return self.results


def checkpoint(work: Path, weights: str) -> Path:
    """The bench preset and its conversion, made when missing."""
    official, converted = work / "bench-official", work / f"bench-{weights}"
    if not (official / "model.safetensors.index.json").is_file():
        write_checkpoint(Sizes(**PRESETS["bench"]), official)
    if not converted.exists():
        start = time.perf_counter()
        convert(official, converted, Weights(weights))
        print(f"converted to {weights} in {time.perf_counter() - start:.0f} s")
    return converted


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="directory for checkpoints (about 8 GB)")
    parser.add_argument("--weights", nargs="+", default=["w8a8", "bf16"], choices=["w8a8", "bf16"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", action="store_true", help="show where the time goes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    profile = OperatorTimes() if args.profile else None
    if profile is not None:
        profile.install()
    results = {}
    for weights in args.weights:
        bench = Bench(checkpoint(args.work, weights), args.dtype, 8, 2048, 4096, profile)
        bench._run(1, 64, 4)  # first touch
        print(f"--- {weights}, {args.dtype}, {torch.get_num_threads()} threads, {len(list(operators()))} operators")
        results[weights] = bench.measure(1, 1024, 32) + bench.measure(8, 64, 32)
        bench.core.engine_core.shutdown()
        del bench
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
