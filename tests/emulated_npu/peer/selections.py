"""Index selections and candidate blocks, compared through their scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .measure import Result, engine, golden, prompt_of


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
            # a consumer of candidates: its rows need the same blocks
            filtered = f"index{layer}.candidates" in data and bool((scores == -torch.inf).tril().any())
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
