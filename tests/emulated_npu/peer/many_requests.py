"""Several requests at once, prefixes, samples, images."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file

from .engine import Trace
from .measure import GOLDEN, Result, engine, figures, head_of, prompt_of


def together(model: str, preset: str, tokens: int = 12, border: bool = False, **options: Any) -> Result:
    """Several requests at once against each alone.

    border: both requests grow over the border of a block; with too few blocks one of them is preempted and comes back.
    """
    own = engine(model, preset, **options)
    long = prompt_of(preset, 130)[0]
    prompts = [long[:120], long[4:124]] if border else [prompt_of(preset, n)[0] for n in (17, 40, 130)]
    alone = [own.generate([p], tokens)[0] for p in prompts]
    scheduler = own.llm.llm_engine.engine_core.engine_core.scheduler
    preempted = [0]
    preempt = scheduler._preempt_request

    def counted(*arguments: Any, **keywords: Any) -> Any:
        preempted[0] += 1
        return preempt(*arguments, **keywords)

    scheduler._preempt_request = counted
    both = own.generate(prompts, tokens)
    return {
        "preempted": preempted[0],
        "equal": [a == b for a, b in zip(alone, both, strict=True)],
        "tokens": alone,
        "together": both,
    }


def prefix_hits(model: str, preset: str = "a", length: int = 300, **options: Any) -> Result:
    own = engine(model, preset, enable_prefix_caching=True, **options)
    prompt, tokens = prompt_of(preset, length)
    first, second = own.run(prompt, tokens), own.run(prompt, tokens)
    rows = [p for p in second.hidden if p < length]
    equal = sum(torch.equal(first.hidden[p], second.hidden[p]) for p in rows)
    return {"cached": second.cached, "rows": len(rows), "equal": equal}


def sampling(model: str, preset: str, draws: int = 320, **options: Any) -> Result:
    """The first sampled token at temperature 1 against softmax of the logits (total variation), and seeds."""
    from vllm import SamplingParams

    own = engine(model, preset, max_num_seqs=64, max_num_batched_tokens=2048, **options)
    prompt = prompt_of(preset, 17)[0][:2]  # short: the interpreter runs one program per token and hash column
    logits = own.run(prompt, [], tokens=1).logits[1]
    wanted = torch.softmax(logits, -1)
    request = {"prompt_token_ids": prompt}
    parameters = [SamplingParams(temperature=1.0, max_tokens=1, seed=i, detokenize=False) for i in range(draws)]
    outputs = own.llm.generate([request] * draws, parameters, use_tqdm=False)
    counts = torch.bincount(torch.tensor([o.outputs[0].token_ids[0] for o in outputs]), minlength=len(wanted))
    seeded = [own.generate([prompt] * n, 6, temperature=1.0, top_p=0.9, top_k=40, seed=7)[0] for n in (1, 3)]
    expected = float((wanted * (1 - wanted) / draws).sqrt().sum()) * 0.4  # mean absolute deviation of that many draws
    return {
        "draws": draws,
        "total_variation": round(float((counts / draws - wanted).abs().sum() / 2), 4),
        "expected": round(expected, 4),
        "seed_repeats": seeded[0] == seeded[1],
        "tokens": seeded[0],
    }


def images(model: str, preset: str = "a", name: str = "image_1", **options: Any) -> Result:
    """Golden image prompts, given to the engine as processed inputs: the tiny tokenizer lacks the processor's
    fixed ids.
    """
    from transformers import BatchFeature
    from vllm import SamplingParams
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    own = engine(
        model,
        preset,
        limit_mm_per_prompt={"image": 2},
        skip_mm_profiling=True,
        skip_tokenizer_init=False,
        tokenizer_mode="deepseek_v41",
        **options,
    )
    official = load_file(GOLDEN / preset / "golden" / f"{name}.official.safetensors")
    data = load_file(GOLDEN / preset / "golden" / f"{name}.exact-fp32.safetensors")
    pictures = [k for k in range(4) if f"image{k}.patches" in official]
    grid = torch.stack([official[f"image{k}.vit_grid"] for k in pictures])
    types = [official[f"image{k}.types"] for k in pictures]
    feature = BatchFeature(
        {
            "patches": torch.cat([official[f"image{k}.patches"] for k in pictures]),
            "vit_grid": grid,
            "llm_grid": -(-grid // 3),
            "types": torch.cat(types),
        }
    )
    sizes = torch.tensor([len(t) for t in types])
    fields = {
        "patches": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "vit_grid": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "llm_grid": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "types": MultiModalFieldConfig.flat_from_sizes("image", sizes, keep_on_cpu=True),
    }
    spans = [
        PlaceholderRange(offset=int(official[f"image{k}.start"]), length=len(t))
        for k, t in zip(pictures, types, strict=True)
    ]
    ids = official["input_ids"].tolist()
    prompt = mm_input(
        ids,
        MultiModalKwargsItems.from_hf_inputs(feature, fields),
        {"image": [f"picture{k}" for k in pictures]},
        {"image": spans},
    )
    trace = own.trace = Trace(ids)
    own._forced = official["decode_tokens"].tolist()
    steps = len(own._forced)
    llm = own.llm.llm_engine
    llm.add_request(
        "image", prompt, SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True, detokenize=False)
    )
    while llm.has_unfinished_requests():
        llm.step()
    decode = trace.rows(trace.logits, range(len(ids), len(ids) + steps))
    # placeholders have no output, and rows of replayed graphs are not seen
    shown = [p for p in sorted(trace.hidden) if p < len(ids) and data["prefill_logits"][p].any()]
    prefill = torch.stack([trace.hidden[p] for p in shown]).float() @ head_of(model).t()
    return {
        "pictures": len(pictures),
        "prefill": figures(prefill, data["prefill_logits"][shown]),
        "decode": figures(decode, data["decode_logits"]),
    }
