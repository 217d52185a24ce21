"""A checkpoint of random weights with the released head sizes, converted, served and compared: ``dsv41 selftest``.

As a program it is the serving part, in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from ..quant import Weights, convert
from ..tiny_checkpoint import PRESETS, Sizes, write_checkpoint
from .members import RESULT, run_members

PROMPTS = ([11 + 7 * i % 300 for i in range(23)], [5 + 13 * i % 290 for i in range(140)])
TOKENS, DRAFTED = 24, 5
LIMIT = 900  # seconds: kernels are compiled on the way
SIZES = [1 + DRAFTED, 2 * (1 + DRAFTED)]  # of captured graphs


def options(kind: str) -> dict[str, Any]:
    """Of ``vllm.LLM``: on a device as it is served, with graphs and drafts; on a CPU there are no graphs."""
    drafts = {"method": "dspark", "num_speculative_tokens": DRAFTED}
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0, "cudagraph_capture_sizes": SIZES}
    return {
        "quantization": "ascend",
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 256,
        "block_size": 128,
        "num_gpu_blocks_override": 64,
        "gpu_memory_utilization": 0.1,
        "enable_prefix_caching": False,
        "limit_mm_per_prompt": {"image": 0},
        "skip_tokenizer_init": True,
        "speculative_config": drafts,
        "enforce_eager": kind == "cpu",
        **({} if kind == "cpu" else {"compilation_config": graphs, "async_scheduling": False}),
    }


def generate(kind: str, model: Path) -> list[list[int]]:
    """Greedy tokens of both prompts together, by vLLM in this process."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(model), **options(kind))
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    given: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [list(out.outputs[0].token_ids) for out in llm.generate(given, greedy, use_tqdm=False)]


def served(kind: str, directory: Path) -> tuple[Path, list[list[int]]]:
    """Write and convert the checkpoint in ``directory``, serve it in a process. -> (checkpoint, tokens by prompt).

    Raises MemberError when the engine does not start or answer.
    """
    from .serve import plugin_names

    official, converted = directory / "official", directory / "w8a8"
    write_checkpoint(Sizes(**PRESETS["c"]), official)
    convert(official, converted, Weights.W8A8, workers=1)
    fixed = {"VLLM_PLUGINS": plugin_names(), "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    fixed |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    said = run_members(__name__, [kind, str(converted)], [fixed], directory, LIMIT)
    tokens: list[list[int]] = json.loads(said)
    return converted, tokens


if __name__ == "__main__":
    Path(os.environ[RESULT]).write_text(json.dumps(generate(sys.argv[1], Path(sys.argv[2]))), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # interpreters of Triton and vLLM's threads take their time to end
