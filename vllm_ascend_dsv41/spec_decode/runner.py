"""The part of a V1 model runner that drafts: for runners of every device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..upstream import require_method
from .options import drafts_with_dspark
from .proposer import DSparkProposer
from .sampler import DraftVerifier, without_drafts

#: Methods of vLLM 0.30.0's V1 runner that are overridden or relied on, with the arguments they must have.
HOOKS = {
    "_build_attention_metadata": (),
    "_get_spec_decode_draft_probs": ("spec_decode_metadata",),
    "_input_fits_in_drafter": ("common_attn_metadata",),
    "_sample": ("logits", "spec_decode_metadata"),
    "propose_draft_token_ids": ("scheduler_output", "sampled_token_ids", "sampling_metadata"),
}


class DSparkRunner:
    """Mixed in front of vLLM's V1 runner (or of one derived from it); does nothing unless DSpark was asked for.

    vLLM's runner verifies drafted tokens, samples, keeps its books and then asks for drafts with the tokens that were
    accepted, on the host. Everything a draft reads was written by the target's forward pass for every token of the
    step, so a draft may follow in any step: after a rejection, a prefix hit or a preemption nothing is to be undone.
    """

    drafter: Any
    hooks = HOOKS
    upstream = "vllm"  # package of the runner that is overridden

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        if drafts_with_dspark(vllm_config.speculative_config):
            for name, arguments in self.hooks.items():
                require_method(type(self), name, arguments, self.upstream)
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        self._tables: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}  # request -> probabilities [K, V] that its draft was drawn from
        if self.drafts:
            sampler, config = self.sampler, vllm_config.speculative_config  # type: ignore[attr-defined]
            self.rejection_sampler = DraftVerifier(sampler, config, device)

    @property
    def drafts(self) -> bool:
        """Whether drafts are DSpark's; vLLM's other methods stay as they are, for other models."""
        return isinstance(getattr(self, "drafter", None), DSparkProposer)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, keeping the block tables of this step's requests for the draft."""
        built = super()._build_attention_metadata(*args, **kwargs)  # type: ignore[misc]
        if self.drafts:
            self._tables = {name: built[0][name].block_table for name in self.drafter.window_prefixes}
        return built

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: drafts write no rows, and the scheduler does not schedule tokens beyond the longest sequence."""
        if self.drafts:
            return common_attn_metadata is not None
        return bool(super()._input_fits_in_drafter(common_attn_metadata))  # type: ignore[misc]

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """As upstream, for the drafts that can be verified.

        The scheduler pads a request that comes into a step of verifications with ids of -1, to keep its shape; such a
        request has no draft. And the log probabilities of given tokens (``logprob_token_ids``) exist for one position
        of each request, so that drafts are passed over while somebody asks for them.
        """
        if not self.drafts or spec_decode_metadata is None:
            return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]
        batch = self.input_batch  # type: ignore[attr-defined]
        every = bool(batch.sampling_metadata.logprob_token_ids)
        unused = [row for row, ids in enumerate(batch.spec_token_ids) if ids and (every or ids[0] < 0)]
        if unused:
            for row in unused:
                batch.spec_token_ids[row].clear()  # penalties and the like count them as output
            spec_decode_metadata = without_drafts(spec_decode_metadata, unused)
            if not spec_decode_metadata.max_spec_len:
                return super()._sample(logits[spec_decode_metadata.bonus_logits_indices], None)  # type: ignore[misc]
        return super()._sample(logits, spec_decode_metadata)  # type: ignore[misc]

    def _get_spec_decode_draft_probs(self, spec_decode_metadata: Any) -> Tensor | None:
        """[drafted tokens, V] of this step. A draft may wait while its request gets no turn, so these are kept by
        request; upstream keeps those of the last step only and would take the draft for a greedy one."""
        if not self.drafts:
            probs: Tensor | None = super()._get_spec_decode_draft_probs(spec_decode_metadata)  # type: ignore[misc]
            return probs
        counts = spec_decode_metadata.num_draft_tokens
        drafted = [
            (self._kept.get(name), ids)
            for name, ids in zip(
                self.input_batch.req_ids,  # type: ignore[attr-defined]
                spec_decode_metadata.draft_token_ids.split(counts),
                strict=True,
            )
            if len(ids)
        ]
        width = next((kept.shape[1] for kept, _ in drafted if kept is not None), 0)
        if not width:
            return None
        return torch.cat([_one_hot(ids, width) if kept is None else kept[: len(ids)] for kept, ids in drafted])

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, sampling_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """vLLM's call: see ``draft_tokens``."""
        if not self.drafts:
            return super().propose_draft_token_ids(  # type: ignore[misc]
                scheduler_output, sampled_token_ids, sampling_metadata, *args, **kwargs
            )
        return self.draft_tokens(scheduler_output, sampled_token_ids, sampling_metadata)

    def draft_tokens(
        self, scheduler_output: Any, sampled_token_ids: list[list[int]], sampling_metadata: Any
    ) -> list[list[int]]:
        """Token ids drafted for each request of the batch; none for requests whose prompt is not finished."""
        batch, device = self.input_batch, self.device  # type: ignore[attr-defined]
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        gone = scheduler_output.preempted_req_ids or ()
        alive = self.requests.keys() - gone  # type: ignore[attr-defined]
        self._kept = {name: kept for name, kept in self._kept.items() if name in alive}
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not rows:
            self.draft_idle()
            return drafts
        anchors = torch.tensor([sampled_token_ids[row][-1] for row in rows])
        # the sampled tokens are in the books already: the newest is the anchor
        last = torch.tensor([int(batch.num_tokens_no_spec[row]) - 2 for row in rows])
        # in most steps every row drafts
        index = None if rows == list(range(len(rows))) else torch.tensor(rows, device=device)

        def chosen(values: Tensor) -> Tensor:
            return values[: len(rows)] if index is None else values.index_select(0, index)

        temperature = None if sampling_metadata.all_greedy else chosen(sampling_metadata.temperature)
        generators = {
            place: sampling_metadata.generators[row]
            for place, row in enumerate(rows)
            if row in sampling_metadata.generators
        }
        tables = {name: chosen(table) for name, table in self._tables.items()}
        proposal = self.drafter.propose(anchors, last, tables, temperature, generators)
        for place, (row, tokens) in enumerate(zip(rows, proposal.tokens.tolist(), strict=True)):
            drafts[row] = tokens
            name = batch.req_ids[row]
            self._kept.pop(name, None)
            if proposal.probabilities is not None and name not in batch.greedy_reqs:
                self._kept[name] = proposal.probabilities[place].clone()  # not the whole step's with it
        return drafts

    def draft_idle(self) -> None:
        """A step without drafts here: other data-parallel ranks may have some."""
        if self.drafts and self.parallel_config.data_parallel_size > 1:  # type: ignore[attr-defined]
            self.drafter.idle()


def _one_hot(ids: Tensor, width: int) -> Tensor:
    """Of a greedy request's draft beside drawn ones: [n] -> [n, width] float32."""
    return torch.zeros(len(ids), width, device=ids.device).scatter_(1, ids.long()[:, None], 1.0)
