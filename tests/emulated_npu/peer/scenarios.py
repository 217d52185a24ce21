"""What is asked of vllm-ascend's own V4.1 on the emulated NPU, and the figures that come out.

Every scenario runs in a process of its own: `python -m emulated_npu.peer NAME` prints its result as JSON. The same
functions serve the tests and the tables of docs/peer-on-emulated-npu.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measures import distance, rms
from safetensors.torch import load_file
from torch import Tensor

from . import checkpoint
from .engine import DSPARK, Engine, Trace

GOLDEN = Path(__file__).parents[2] / "golden"
VARIANTS = ("exact-fp32", "exact-weights", "official")
STEPS = 24
#: Layers whose selections are recorded in golden data, and the ratio of their caches, by preset.
Result = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    run: Callable[..., Result]
    preset: str = "c"
    weights: str = "bf16"
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    device_type: str = "A2"

    def __call__(self) -> Result:
        started = time.monotonic()
        result = self.run(str(checkpoint.converted(self.preset, self.weights)), self.preset, **self.options)
        return {"seconds": round(time.monotonic() - started, 1), **result}


def golden(preset: str, length: int, variant: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / preset / "golden" / f"text_{length:04d}.{variant}.safetensors")


def prompt_of(preset: str, length: int) -> tuple[list[int], list[int]]:
    data = golden(preset, length, "exact-fp32")
    return data["input_ids"].tolist(), data["decode_tokens"].tolist()


def any_index_width() -> None:
    """rc2's Triton kernel that quantises index queries takes a width of 128 only; set a has 64. The one patch
    of rc2.
    """
    import vllm_ascend.ops.triton.quantize_indexer_query as module

    own = module.quantize_indexer_query

    def quantize(query: Tensor) -> tuple[Tensor, Tensor]:
        if query.shape[-1] == 128:
            result: tuple[Tensor, Tensor] = own(query)
            return result
        wide = query.float()
        scale = (wide.abs().amax(-1) / 127.0).half().float().clamp_min(2.0**-24)
        return torch.round(wide / scale.unsqueeze(-1)).clamp(-127, 127).to(torch.int8), scale.half()

    module.quantize_indexer_query = quantize


def engine(model: str, preset: str, **options: Any) -> Engine:
    if preset == "a":
        any_index_width()
    return Engine(model, **options)


def head_of(model: str) -> Tensor:
    import json

    from safetensors import safe_open

    index = json.loads((Path(model) / checkpoint.INDEX).read_text())["weight_map"]
    with safe_open(Path(model) / index["head.weight"], "pt") as file:
        return file.get_tensor("head.weight").float()


def _figures(found: Tensor, wanted: Tensor) -> list[float]:
    d = distance(found, wanted)
    return [round(d.rms, 4), round(d.cos_mean, 5), round(d.kl_mean, 4), round(d.top1, 3)]


def compare(trace: Trace, preset: str, length: int, head: Tensor, prefill: bool = True) -> Result:
    """{variant: {"prefill": [rms, cosine, KL, top-1], "decode": [...]}}; prefill through an FP32 head, decode
    as rc2 says it.
    """
    out: Result = {}
    for variant in VARIANTS:
        data = golden(preset, length, variant)
        decode = trace.rows(trace.logits, range(length, length + STEPS))
        out[variant] = {"decode": _figures(decode, data["decode_logits"])}
        if prefill:
            hidden = trace.rows(trace.hidden, range(length)).float()
            out[variant]["prefill"] = _figures(hidden @ head.t(), data["prefill_logits"])
    return out


# ---- forced along DeepSeek's tokens ----
def forced(model: str, preset: str, lengths: tuple[int, ...] = (17, 40, 130), **options: Any) -> Result:
    own = engine(model, preset, **options)
    head = head_of(model)
    out: Result = {}
    for length in lengths:
        prompt, tokens = prompt_of(preset, length)
        trace = own.run(prompt, tokens)
        out[str(length)] = compare(trace, preset, length, head, prefill=True)
        out[f"{length}.digest"] = _digest(trace, length)
    out["graphs"] = _graph_counts()
    return out


def _digest(trace: Trace, length: int) -> str:
    """Equal digests: bit-equal decode logits."""
    import hashlib

    return hashlib.sha256(trace.rows(trace.logits, range(length, length + STEPS)).numpy().tobytes()).hexdigest()[:12]


def _graph_counts() -> dict[str, int]:
    from emulated_npu import graphs

    return dict(graphs.counts)


# ---- drafting ----
def dspark(
    model: str, preset: str, lengths: tuple[int, ...] = (17,), corrected_tap: bool = False, **options: Any
) -> Result:
    """Drafts against golden `spec_output_ids` at the same anchors.

    corrected_tap: the V2 runner takes the draft's input one layer too low; this sets the ids that V1 uses.
    """
    own = engine(model, preset, speculative_config=dict(DSPARK), **options)
    if corrected_tap:
        own.model.set_aux_hidden_state_layers(tuple(i + 1 for i in target_layers(own)))
    head = head_of(model)
    out: Result = {"tap": tapped_layers(own)}
    for length in lengths:
        prompt, tokens = prompt_of(preset, length)
        trace = own.run(prompt, tokens)
        figures = compare(trace, preset, length, head, prefill=False)
        for variant in VARIANTS:
            ids = golden(preset, length, variant)["spec_output_ids"]
            steps = [
                (anchor - length - 1, drafts) for anchor, drafts in trace.drafts if 0 <= anchor - length - 1 < STEPS - 1
            ]
            wanted = [ids[i][1 : 1 + len(drafts)].tolist() for i, drafts in steps]
            first = sum(d[0] == w[0] for (_, d), w in zip(steps, wanted, strict=True))
            every = sum(a == b for (_, d), w in zip(steps, wanted, strict=True) for a, b in zip(d, w, strict=True))
            figures[variant]["drafts"] = [first, len(steps), every, sum(map(len, wanted))]
        out[str(length)] = figures
        out[f"{length}.drafts"] = [drafts for _, drafts in trace.drafts]
    out["graphs"] = _graph_counts()
    return out


def target_layers(own: Engine) -> list[int]:
    config = own.llm.llm_engine.vllm_config.model_config.hf_config
    text = getattr(config, "text_config", config)
    return [int(i) for i in text.dspark_target_layer_ids]


def tapped_layers(own: Engine) -> list[int]:
    """Layers whose inputs feed the draft: rc2 stores each id plus one."""
    for _, module in own.model.named_modules():
        layers = getattr(module, "aux_hidden_state_layers", None)
        if layers:
            return [int(i) - 1 for i in layers]
    return []


def refused(model: str, preset: str, **options: Any) -> Result:
    """A configuration that rc2 does not start with: the error it gives."""
    try:
        engine(model, preset, **options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {"error": "none: it starts"}


def accepted(model: str, preset: str, length: int = 17, **options: Any) -> Result:
    """Drafts are accepted and rejected in turn (0, 3, 5, 1, 2, 5, 4, 0, 1 of 5); the rows against a plain prefill of
    the
    resulting text: what survives in rings, windows and histories."""
    pattern = [0, 3, 5, 1, 2, 5, 4, 0, 1]
    own = engine(model, preset, speculative_config=dict(DSPARK), **options)
    own.accept = lambda step: pattern[step % len(pattern)]
    prompt, _ = prompt_of(preset, length)
    trace = own.run(prompt, [], tokens=60)
    own.accept = None
    text = prompt + trace.tokens
    plain = own.run(text, [], tokens=1)
    head = head_of(model)
    positions = [p for p in sorted(trace.logits) if length - 1 <= p < len(text) - 1]
    found = torch.stack([trace.logits[p] for p in positions])
    wanted = torch.stack([plain.hidden[p].float() for p in positions]) @ head.t()
    return {"verify_steps": len(trace.drafts), "rows": len(positions), "plain_prefill": _figures(found, wanted)}


# ---- selections, through their scores ----
def selections(model: str, preset: str = "a", length: int = 130, **options: Any) -> Result:
    """Index selections and candidate blocks of a prefill: BF16 logits do not show a skipped candidate stage."""
    own = engine(model, preset, **options)
    from vllm_ascend.models.deepseek_v41 import model as rc2  # not before the platform has patched vLLM

    kept: dict[str, Tensor] = {}
    forward = rc2.DeepseekV41Attention.forward

    def tapped(self: Any, positions: Tensor, x: Tensor, *arguments: Any, **keywords: Any) -> Any:
        result = forward(self, positions, x, *arguments, **keywords)
        if own.trace is not None and own._tokens == length and self.role.is_index_source:
            kept[f"{self.layer_idx}.topk"] = self.shared_state.topk_indices[:length].cpu()
            if self.shared_state.candidates is not None:
                kept[f"{self.layer_idx}.candidates"] = self.shared_state.candidates[:length].cpu()
        return result

    rc2.DeepseekV41Attention.forward = tapped
    prompt, tokens = prompt_of(preset, length)
    own.run(prompt, tokens, tokens=1)
    data = golden(preset, length, "exact-fp32")
    config = own.llm.llm_engine.vllm_config.model_config.hf_config
    size = int(getattr(config, "text_config", config).candidate_block_size)
    agree = torch.ones(length, dtype=torch.bool)
    out: Result = {}
    for name, rows in sorted(kept.items()):  # the source of candidates comes before the layers that use them
        layer, kind = name.split(".")
        if kind == "candidates" and f"index{layer}.candidates" in data:
            agree = _same_blocks(rows, data[f"index{layer}.candidates"].bool(), size)
            out[f"candidates of layer {layer}"] = {"rows": length, "equal": int(agree.sum())}
    for name, rows in kept.items():
        layer, kind = name.split(".")
        if kind == "topk" and f"index{layer}.topk" in data:
            scores = data[f"index{layer}.scores"].float()
            filtered = bool(
                (scores == -torch.inf).tril().any()
            )  # a consumer of candidates: its rows need the same blocks
            chosen = agree if filtered else torch.ones(length, dtype=torch.bool)
            out[f"layer {layer}"] = _selection(rows[chosen], data[f"index{layer}.topk"][chosen], scores[chosen])
    return out


def _same_blocks(blocks: Tensor, mask: Tensor, size: int) -> Tensor:
    """blocks int32 [L, 1, C] padded with -1, mask bool [L, n] of golden data -> rows in which they agree, bool [L]."""
    rows = []
    for position, (chosen, wanted) in enumerate(zip(blocks[:, 0], mask, strict=True)):
        found = torch.zeros(len(wanted) + size, dtype=torch.bool)
        for block in chosen[chosen >= 0].tolist():
            found[block * size : (block + 1) * size] = True
        rows.append(torch.equal(found[: position + 1], wanted[: position + 1]))
    return torch.tensor(rows)


def _selection(found: Tensor, wanted: Tensor, scores: Tensor) -> Result:
    """Rows whose set is the golden one; worst_gap: how far apart scores of exchanged positions are, as a share of the
    row's maximum."""
    equal, gaps, missing, total = 0, [0.0], 0, 0
    for row, (a, b) in enumerate(zip(found, wanted, strict=True)):
        ours, theirs = set(a[a >= 0].tolist()), set(b[b >= 0].tolist())
        equal += ours == theirs
        total += len(theirs)
        missing += len(theirs - ours)
        if ours - theirs and theirs - ours:
            low = min(float(scores[row, p]) for p in ours - theirs)
            high = max(float(scores[row, p]) for p in theirs - ours)
            gaps.append((high - low) / float(scores[row, sorted(theirs)].abs().max()))
    return {"rows": len(found), "equal": equal, "missing": missing, "of": total, "worst_gap": round(max(gaps), 4)}


# ---- many requests ----
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


# ---- images ----
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
    prefill = trace.rows(trace.hidden, range(len(ids))).float() @ head_of(model).t()
    shown = data["prefill_logits"].abs().sum(-1) > 0  # placeholders have no output
    return {
        "pictures": len(pictures),
        "prefill": _figures(prefill[shown], data["prefill_logits"][shown]),
        "decode": _figures(decode, data["decode_logits"]),
    }


# ---- several devices ----
def parallel(model: str, preset: str, tokens: int = 8, **options: Any) -> Result:
    """Greedy tokens and their log-probabilities, worker processes with collectives over shared memory."""
    import vllm

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    llm = vllm.LLM(
        model=model,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.05,
        num_gpu_blocks_override=64,
        block_size=128,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        limit_mm_per_prompt={"image": 0},
        **options,
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
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        gpu_memory_utilization=0.05,
        num_gpu_blocks_override=64,
        block_size=128,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        limit_mm_per_prompt={"image": 0},
        data_parallel_size=2,
        **options,
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


def nested_tables(model: str, preset: str, length: int = 17, **options: Any) -> Result:
    """The converter's own layout, tables in `engram_int8/`: how wrong rc2 is, which does not read them."""
    nested = str(checkpoint.converted(preset, "w8a8", nested=True))
    own = engine(nested, preset, **options)
    prompt, tokens = prompt_of(preset, length)
    trace = own.run(prompt, tokens)
    wanted = golden(preset, length, "exact-fp32")["decode_logits"]
    return {"decode_rms": round(rms(trace.rows(trace.logits, range(length, length + STEPS)), wanted), 3)}


_V2, _GRAPHS = {"runner": "v2"}, {"graphs": True}
SCENARIOS: dict[str, Scenario] = {}
for _preset, _lengths in (("a", (17, 40, 130, 300)), ("c", (17, 40, 130))):
    for _weights in ("bf16", "w8a8"):
        for _name, _options in (("v1", {}), ("v2", _V2), ("v1-graph", _GRAPHS), ("v2-graph", _V2 | _GRAPHS)):
            SCENARIOS[f"{_preset}-{_weights}-{_name}"] = Scenario(
                forced, _preset, _weights, {"lengths": _lengths, **_options}
            )
SCENARIOS |= {
    "dspark-v1": Scenario(dspark, options={"lengths": (17, 40, 130)}),
    "dspark-v2": Scenario(dspark, options={"lengths": (17,), **_V2}),
    "dspark-v2-corrected": Scenario(dspark, options={"lengths": (17,), "corrected_tap": True, **_V2}),
    "dspark-v1-w8a8": Scenario(dspark, weights="w8a8"),
    "dspark-v1-graph": Scenario(
        dspark,
        options={"lengths": (17,), "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}, **_GRAPHS},
    ),
    "dspark-v2-graph": Scenario(
        dspark,
        options={
            "lengths": (17,),
            "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0},
            **_GRAPHS,
            **_V2,
        },
    ),
    "dspark-accepted": Scenario(accepted),
    "dspark-set-a": Scenario(refused, "a", options={"speculative_config": DSPARK}),
    "selections-bf16": Scenario(selections, "a"),
    "selections-w8a8": Scenario(selections, "a", "w8a8"),
    "chunks": Scenario(forced, "a", options={"lengths": (40, 130), "max_num_batched_tokens": 37}),
    "blocks-64": Scenario(forced, "a", options={"lengths": (130,), "block_size": 64}),
    "together": Scenario(together, options={"max_num_batched_tokens": 37}),
    "together-v2": Scenario(together, options={"max_num_batched_tokens": 37, **_V2}),
    "preemption": Scenario(
        together, options={"tokens": 12, "border": True, "max_model_len": 256, "num_gpu_blocks_override": 16}
    ),
    "prefix-hits": Scenario(prefix_hits, "a"),
    "sampling-v1": Scenario(sampling),
    "sampling-v2": Scenario(sampling, options=_V2),
    "image-1": Scenario(images, "a"),
    "image-2": Scenario(images, "a", options={"name": "image_2"}),
    "image-1-w8a8": Scenario(images, "a", "w8a8"),
    "tp1": Scenario(parallel),
    "tp2": Scenario(parallel, options={"tensor_parallel_size": 2}, devices=2),
    "ep2": Scenario(parallel, options={"tensor_parallel_size": 2, "enable_expert_parallel": True}, devices=2),
    "ep2-w8a8-a3": Scenario(
        parallel,
        weights="w8a8",
        options={"tensor_parallel_size": 2, "enable_expert_parallel": True},
        devices=2,
        device_type="A3",
    ),
    "tp1-w8a8": Scenario(parallel, weights="w8a8"),
    "dp2": Scenario(idle_ranks, options={"enable_expert_parallel": True}, devices=2),
    "nested-tables": Scenario(nested_tables, weights="w8a8"),
}
