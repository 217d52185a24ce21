"""Decode steps with DSpark: tokens per step, and where the time of a step goes.

    python benchmarks/dspark.py --work DIR [--preset bench] [--batch 1 8] [--acceptance 3.5]

One process on CPU, W8A8 weights, BF16. Random weights agree on nothing, so drafts are accepted at the rate that
``--acceptance`` (mean tokens per step) asks for, whatever they say: vLLM's synthetic rejection. The first line of each
batch size is decoding without drafts. Times are exclusive: what a part calls and is listed itself is not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm_ascend_dsv41.quant import Weights, convert
from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes, write_checkpoint

PROMPT, TOKENS, WARM = 200, 64, 8

#: Host work that drafting adds to a step: what is not the draft's own computation.
HOST = ("rows, tensors and lists of a draft", "draft tokens to the scheduler")


class Clock:
    """Exclusive seconds of named calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = [0.0]

    def watch(self, name: str, owner: Any, method: str) -> None:
        """Time every call of ``owner.method``."""
        right: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return right(*args, **kwargs)
            finally:
                total = time.perf_counter() - start
                self.seconds[name] += total - self._inner.pop()
                self._inner[-1] += total

        setattr(owner, method, timed)


def engine(model: Path, batch: int, acceptance: float | None) -> Any:
    """A vLLM engine in this process; ``acceptance`` None: without drafts."""
    from vllm import LLM

    options: dict[str, Any] = {}
    if acceptance is not None:
        options["speculative_config"] = {
            "method": "dspark",
            "num_speculative_tokens": 5,
            "enforce_eager": True,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": acceptance,
        }
    return LLM(
        model=str(model),
        quantization="ascend",
        tokenizer_mode="deepseek_v41",
        dtype="bfloat16",
        block_size=128,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=batch,
        max_num_batched_tokens=max(2048, batch * PROMPT),
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        **options,
    )


def measure(model: Path, batch: int, acceptance: float | None) -> dict[str, Any]:
    """Decode steps of ``batch`` requests, after some that warm up."""
    from vllm import SamplingParams

    llm = engine(model, batch, acceptance)
    core = llm.llm_engine
    inner = core.engine_core.engine_core
    runner = inner.model_executor.driver_worker.worker.model_runner
    clock, source = Clock(), random.Random(1)
    clock.watch("step: scheduler, books, output", core, "step")
    clock.watch("runner: inputs and metadata", runner, "execute_model")
    clock.watch("target: layers", runner, "_model_forward")
    clock.watch("target: head", runner.model, "compute_logits")
    clock.watch("sampling or verification", runner, "_sample")
    if acceptance is not None:
        clock.watch(HOST[0], runner, "propose_draft_token_ids")
        clock.watch("draft: Markov bias and choice", runner.drafter, "propose")
        clock.watch("draft: stages and head", runner.model, "draft")
        clock.watch(HOST[1], inner.scheduler, "update_draft_token_ids")
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS * 2, ignore_eos=True)
    for number in range(batch):
        prompt = [source.randrange(3, 370) for _ in range(PROMPT)]
        core.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    count: dict[str, int] = {}

    def step() -> None:
        for output in core.step():
            count[output.request_id] = len(output.outputs[0].token_ids)

    for _ in range(WARM):
        step()
    before, steps = sum(count.values()), 0
    clock.seconds.clear()
    start = time.perf_counter()
    while min(count.values()) < TOKENS:
        step()
        steps += 1
    wall = time.perf_counter() - start
    tokens = sum(count.values()) - before
    result = {
        "batch": batch,
        "drafts": acceptance is not None,
        "steps": steps,
        "tokens per step and request": round(tokens / steps / batch, 2),
        "ms per step": round(1e3 * wall / steps, 2),
        "ms per token and request": round(1e3 * wall / (tokens / batch), 2),
        "parts, ms per step": {name: round(1e3 * t / steps, 3) for name, t in sorted(clock.seconds.items())},
    }
    if acceptance is not None:
        result["host overhead of drafting, us per step"] = round(1e6 * sum(clock.seconds[n] for n in HOST) / steps)
    core.engine_core.shutdown()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, required=True, help="where checkpoints are made, and kept for the next run"
    )
    parser.add_argument("--preset", default="bench", choices=sorted(PRESETS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--acceptance", type=float, default=3.5, help="mean tokens per step, 1 to 6")
    arguments = parser.parse_args()
    official, converted = (arguments.work / f"{arguments.preset}-{kind}" for kind in ("official", "w8a8"))
    if not converted.exists():
        write_checkpoint(Sizes(**PRESETS[arguments.preset]), official)
        convert(official, converted, Weights.W8A8)
    for batch in arguments.batch:
        for acceptance in (None, arguments.acceptance):
            print(json.dumps(measure(converted, batch, acceptance), indent=1), flush=True)


if __name__ == "__main__":
    main()
