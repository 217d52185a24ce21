"""vLLM's rejection sampler with our verification in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..upstream import RejectionSampler, SamplerOutput, apply_top_k_top_p, generate_uniform_probs
from .verification import Drafted, verify


class DraftVerifier(RejectionSampler):  # type: ignore[misc]
    """Logits processors, bonus tokens and logprobs are upstream's; temperature, top-k, top-p and the verification of
    drafted tokens are device neutral here. Source: ``vllm.v1.sample.rejection_sampler.RejectionSampler.forward``."""

    def __init__(self, sampler: Any, speculative_config: Any, device: torch.device) -> None:
        super().__init__(sampler, speculative_config, device)
        self.block = speculative_config.rejection_sample_method == "block"

    def forward(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        """logits: [drafted tokens + requests, V], of the target; draft_probs: [drafted tokens, V] or None when drafts
        are greedy. Returns vLLM's SamplerOutput with tokens [requests, K + 1], -1 behind the last of each."""
        processed = self.is_processed_logprobs_mode
        bonus = self.sampler(
            logits=logits[metadata.bonus_logits_indices],
            sampling_metadata=replace(sampling_metadata, max_num_logprobs=-1),
            predict_bonus_token=True,
            logprobs_mode_override="processed_logits" if processed else "raw_logits",
        )
        raw = logits[metadata.target_logits_indices].float()
        target = self.apply_logits_processors(raw if processed else raw.clone(), sampling_metadata, metadata)
        target = _constrain(target, metadata.num_draft_tokens, sampling_metadata)
        drafted = Drafted.of(metadata.num_draft_tokens, metadata.draft_token_ids, draft_probs)
        draws = generate_uniform_probs(
            len(target), metadata.num_draft_tokens, sampling_metadata.generators, target.device
        )
        tokens = verify(
            drafted,
            target,
            bonus.sampled_token_ids[:, 0].long(),
            draws[drafted.rows],
            None if sampling_metadata.all_greedy else sampling_metadata.temperature == 0,
            {r: g for r, g in sampling_metadata.generators.items() if metadata.num_draft_tokens[r]},
            self.block,
            self.synthetic_conditional_rates,
        )
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                logits,
                target if processed else raw,
                bonus.logprobs_tensors.logprobs,
                tokens,
            )
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def _constrain(logits: Tensor, counts: list[int], sampling_metadata: Any) -> Tensor:
    """Each request's temperature, top-k and top-p on the rows [N, V] of its drafted tokens."""
    if sampling_metadata.all_greedy:
        return logits
    lengths = torch.tensor(counts, device=logits.device)

    def every(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat_interleave(lengths, output_size=len(logits))

    temperature = sampling_metadata.temperature
    divisor = torch.where(temperature == 0, 1.0, temperature)  # greedy requests beside others
    logits.div_(divisor.repeat_interleave(lengths, output_size=len(logits))[:, None])
    return apply_top_k_top_p(logits, every(sampling_metadata.top_k), every(sampling_metadata.top_p))


def without_drafts(metadata: Any, rows: list[int]) -> Any:
    """vLLM's SpecDecodeMetadata with no drafted tokens for some requests: their next token is drawn in front of the
    first of them."""
    counts, device = metadata.num_draft_tokens, metadata.draft_token_ids.device
    left = [0 if row in rows else count for row, count in enumerate(counts)]
    keep = torch.tensor([row not in rows for row, count in enumerate(counts) for _ in range(count)], device=device)
    dropped = torch.tensor([a - b for a, b in zip(counts, left, strict=True)], device=device)
    ends = torch.tensor(left, device=device, dtype=metadata.cu_num_draft_tokens.dtype).cumsum(0)
    return replace(
        metadata,
        draft_token_ids=metadata.draft_token_ids[keep],
        num_draft_tokens=left,
        cu_num_draft_tokens=ends.to(metadata.cu_num_draft_tokens.dtype),
        target_logits_indices=metadata.target_logits_indices[keep],
        bonus_logits_indices=metadata.bonus_logits_indices - dropped,
    )
