"""Run as a program: greedy tokens and log probabilities of prompts, with given engine options, as JSON."""

from __future__ import annotations

import base64
import io
import json
import sys

from PIL import Image


def main() -> None:
    """stdin: {"model", "options", "prompts", "tokens"}, and "pictures" of each prompt, files in base64; last line of
    stdout: the result."""
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    llm = LLM(
        model=job["model"], quantization="ascend", tokenizer_mode="deepseek_v41", block_size=128, **job["options"]
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=5)
    asked = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    for prompt, files in zip(asked, job.get("pictures") or [[]] * len(asked), strict=True):
        if files:
            pictures = [Image.open(io.BytesIO(base64.b64decode(file))) for file in files]
            prompt["multi_modal_data"] = {"image": pictures}
    outputs = llm.generate(asked, sampling, use_tqdm=False)
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
