"""What the scenarios share: golden data, an engine, and figures of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from measures import distance
from safetensors.torch import load_file
from torch import Tensor

from . import checkpoint
from .engine import Engine, Trace

GOLDEN = Path(__file__).parents[2] / "golden"
VARIANTS = ("exact-fp32", "exact-weights", "official")
STEPS = 24
Result = dict[str, Any]


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


def figures(found: Tensor, wanted: Tensor) -> list[float]:
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
        out[variant] = {"decode": figures(decode, data["decode_logits"])}
        if prefill:
            hidden = trace.rows(trace.hidden, range(length)).float()
            out[variant]["prefill"] = figures(hidden @ head.t(), data["prefill_logits"])
    return out
