"""Run as a program: greedy tokens and log probabilities of prompts, with given engine options, as JSON."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """stdin: {"model", "options", "prompts", "tokens"}; last line of stdout: the result."""
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    llm = LLM(
        model=job["model"], quantization="ascend", tokenizer_mode="deepseek_v41", block_size=128, **job["options"]
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=5)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    result = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [{str(t): lp.logprob for t, lp in step.items()} for step in output.outputs[0].logprobs],
        }
        for output in outputs
    ]
    print("\n" + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
