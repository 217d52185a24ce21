"""A tiny Llama, the same in vLLM on CPU and in vllm-ascend on the emulated NPU.

python -m emulated_npu.llama FOLDER [JSON options of vllm.LLM]     prints tokens and log-probabilities
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[3, 5, 7, 11, 13], [2, 4], list(range(20, 60))]
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.05,
    "num_gpu_blocks_override": 64,
    "block_size": 128,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
}
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0, "cudagraph_capture_sizes": [1, 2, 4]}


def checkpoint(folder: Path) -> Path:
    """Two layers, grouped queries, random weights that are large enough for tokens to depend on every one of them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def generate(folder: str, **options: Any) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(model=folder, **{**OPTIONS, "enforce_eager": True, **options})
    parameters = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True, detokenize=False)
    out: dict[str, Any] = {"tokens": [], "logprobs": []}
    for output in llm.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False):
        completion = output.outputs[0]
        out["tokens"].append(list(completion.token_ids))
        out["logprobs"].append(
            [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        )
    if "EMULATED_NPU" in os.environ:
        from . import graphs

        out["graphs"] = dict(graphs.counts)
    return out


if __name__ == "__main__":
    print(
        "RESULT " + json.dumps(generate(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))),
        flush=True,
    )
