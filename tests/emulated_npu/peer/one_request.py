"""One request along DeepSeek's own tokens, with and without drafts."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from measures import rms

from .engine import DSPARK, Engine, Trace
from .measure import STEPS, VARIANTS, Result, compare, engine, figures, golden, head_of, prompt_of


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
    return hashlib.sha256(trace.rows(trace.logits, range(length, length + STEPS)).numpy().tobytes()).hexdigest()[:12]


def _graph_counts() -> dict[str, int]:
    from emulated_npu import graphs

    return dict(graphs.counts)


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
        compared = compare(trace, preset, length, head, prefill=False)
        for variant in VARIANTS:
            ids = golden(preset, length, variant)["spec_output_ids"]
            steps = [
                (anchor - length - 1, drafts) for anchor, drafts in trace.drafts if 0 <= anchor - length - 1 < STEPS - 1
            ]
            wanted = [ids[i][1 : 1 + len(drafts)].tolist() for i, drafts in steps]
            first = sum(d[0] == w[0] for (_, d), w in zip(steps, wanted, strict=True))
            every = sum(a == b for (_, d), w in zip(steps, wanted, strict=True) for a, b in zip(d, w, strict=True))
            compared[variant]["drafts"] = [first, len(steps), every, sum(map(len, wanted))]
        out[str(length)] = compared
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
    return {"verify_steps": len(trace.drafts), "rows": len(positions), "plain_prefill": figures(found, wanted)}


def nested_tables(model: str, preset: str, length: int = 17, **options: Any) -> Result:
    """Engram tables in a folder of their own: how wrong rc2 is, which does not read them."""
    own = engine(model, preset, **options)
    prompt, tokens = prompt_of(preset, length)
    trace = own.run(prompt, tokens)
    wanted = golden(preset, length, "exact-fp32")["decode_logits"]
    return {"decode_rms": round(rms(trace.rows(trace.logits, range(length, length + STEPS)), wanted), 3)}
