"""Worker processes with collectives, data-parallel engines."""

from __future__ import annotations

import os
from typing import Any

from .measure import Result, prompt_of

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.05,
    "num_gpu_blocks_override": 64,
    "block_size": 128,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
    "limit_mm_per_prompt": {"image": 0},
}


def parallel(model: str, preset: str, tokens: int = 8, **options: Any) -> Result:
    """Greedy tokens and their log-probabilities, worker processes with collectives over shared memory."""
    import vllm

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    llm = vllm.LLM(
        model=model,
        **{**OPTIONS, **options},
    )
    prompts = [{"prompt_token_ids": prompt_of(preset, n)[0]} for n in (17, 40)]
    parameters = vllm.SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=2, ignore_eos=True, detokenize=False)
    out: Result = {"tokens": [], "gaps": []}
    for output in llm.generate(prompts, parameters, use_tqdm=False):
        completion = output.outputs[0]
        out["tokens"].append(list(completion.token_ids))
        best = [sorted((v.logprob for v in step.values()), reverse=True) for step in completion.logprobs]
        out["gaps"].append([round(b[0] - b[1], 4) for b in best])
    return out


def idle_ranks(model: str, preset: str, tokens: int = 8, **options: Any) -> Result:
    """Two data-parallel ranks: one works while the other only takes part, then the other way round, then both."""
    import asyncio

    return asyncio.run(_idle_ranks(model, preset, tokens, options))


async def _idle_ranks(model: str, preset: str, tokens: int, options: dict[str, Any]) -> Result:
    import asyncio

    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=model,
        data_parallel_size=2,
        **{**OPTIONS, **options},
    )
    llm = AsyncLLM.from_engine_args(arguments)
    prompts = [prompt_of(preset, n)[0] for n in (17, 40)]
    parameters = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)

    async def one(which: int, name: str) -> list[int]:
        request = {"prompt_token_ids": prompts[which]}
        outputs = [o async for o in llm.generate(request, parameters, name, data_parallel_rank=which)]
        return list(outputs[-1].outputs[0].token_ids)

    alone = [await one(0, "alone0"), await one(1, "alone1")]
    both = await asyncio.gather(one(0, "both0"), one(1, "both1"))
    llm.shutdown()
    return {"tokens": alone, "together": both}
