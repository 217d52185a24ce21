"""A real vLLM engine in this process, and a recorder of the logits of every token it computes."""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Result:
    """One finished (or aborted) request."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # position -> every computation
    fed: dict[int, list[list[int]]] = field(default_factory=lambda: defaultdict(list))  # tokens of the step up to there
    drafts: list[Draft] = field(default_factory=list)
    logprobs: list[Any] | None = None
    cached: int = 0  # prompt tokens taken from the prefix cache
    preempted: int = 0

    def verified(self) -> dict[int, list[Tensor]]:
        """As ``logits``, of the sequence's own tokens: not behind drafted tokens that were rejected or not wanted."""
        sequence = self.prompt + self.tokens
        found = {}
        for p in range(len(sequence) - bool(self.tokens)):
            computed = zip(self.logits.get(p, ()), self.fed.get(p, ()), strict=True)
            rows = [row for row, ids in computed if ids == sequence[p + 1 - len(ids) : p + 1]]
            if rows:
                found[p] = rows
        return found

    def matrix(self, positions: range | None = None) -> Tensor:
        """[positions, vocabulary]; the last computation of each position."""
        chosen = positions if positions is not None else range(len(self.prompt) + len(self.tokens) - 1)
        return torch.stack([self.logits[p][-1] for p in chosen])


@dataclass
class Draft:
    """A block drafted after token ``anchor``, which stands at ``position``."""

    position: int
    anchor: int
    tokens: list[int]
    logits: Tensor
    confidence: Tensor


class Engine:
    """``vllm.LLM`` without helper processes, driven step by step."""

    _numbers = itertools.count()

    def __init__(self, model: str, **options: Any) -> None:
        from vllm import LLM

        defaults: dict[str, Any] = {
            "dtype": "float32",
            "quantization": "ascend",
            "tokenizer_mode": "deepseek_v41",
            "block_size": 128,
            "enforce_eager": True,
            "max_model_len": 1024,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 2048,
            "seed": 0,
            "disable_log_stats": True,
            # keep every cached block of a window: by default only those at the end of a prompt are kept, and a
            # prompt that shares less than that finds nothing
            "prefix_cache_retention_interval": None,
        }
        self.llm = LLM(model=model, **{**defaults, **options})
        self.core = self.llm.llm_engine
        self.inner = self.core.engine_core.engine_core
        self.runner = self.inner.model_executor.driver_worker.worker.model_runner
        self.results: dict[str, Result] = {}
        self._record()

    def _record(self) -> None:
        from vllm.forward_context import get_forward_context

        model, runner = self.runner.model, self.runner
        forward = model.forward

        def recording(*args: Any, **kwargs: Any) -> Tensor:
            hidden = forward(*args, **kwargs)
            metadata = get_forward_context().attn_metadata
            if isinstance(metadata, dict) and metadata:
                own = next(value for key, value in metadata.items() if key.endswith(".window"))
                logits = model.compute_logits(hidden)
                ids, start = kwargs["input_ids"].tolist(), own.batch.query_start.tolist()
                rows = zip(own.batch.request.tolist(), own.batch.positions.tolist(), logits, strict=True)
                for token, (request, position, row) in enumerate(rows):
                    result = self.results[self._own_name(runner.input_batch.req_ids[request])]
                    result.logits[position].append(row.clone())
                    result.fed[position].append(ids[start[request] : token + 1])
            return hidden

        model.forward = recording
        if getattr(runner, "drafts", False):
            self._record_drafts()

    def _record_drafts(self) -> None:
        runner, propose = self.runner, self.runner.drafter.propose

        def recording(anchors: Tensor, last: Tensor, *args: Any) -> Any:
            proposal = propose(anchors, last, *args)
            confidence = runner.drafter.confidence(proposal, anchors)
            done = [
                name for row, name in enumerate(runner.input_batch.req_ids) if not runner.discard_request_mask.np[row]
            ]
            for row, name in enumerate(done):
                one = (int(last[row]) + 1, int(anchors[row]), proposal.tokens[row].tolist())
                self.results[self._own_name(name)].drafts.append(
                    Draft(*one, proposal.logits[row].clone(), confidence[row].clone())
                )
            return proposal

        runner.drafter.propose = recording

    def _own_name(self, name: str) -> str:
        """vLLM appends a suffix to request ids."""
        return name if name in self.results else name.rpartition("-")[0]

    def add(self, prompt: list[int], max_tokens: int, **sampling: Any) -> str:
        """Queue a request; greedy unless ``sampling`` says otherwise. Returns its name."""
        from vllm import SamplingParams

        name = self.name()
        self.results[name] = Result(list(prompt))
        options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
        self.core.add_request(name, {"prompt_token_ids": list(prompt)}, SamplingParams(**options))
        return name

    def name(self) -> str:
        """Of another request."""
        return f"test{next(self._numbers)}"

    def budget(self, tokens: int) -> None:
        """How many tokens the scheduler may put into a step from now on."""
        self.inner.scheduler.max_num_scheduled_tokens = tokens

    def step(self) -> None:
        """One scheduler step."""
        for output in self.core.step():
            result = self.results[output.request_id]
            result.tokens = list(output.outputs[0].token_ids)
            result.logprobs = output.outputs[0].logprobs
            result.cached = output.num_cached_tokens or 0

    def finish(self) -> None:
        """Step until nothing is left."""
        while self.core.has_unfinished_requests():
            self.step()

    def run(self, prompts: list[list[int]], max_tokens: int = 8, **sampling: Any) -> list[Result]:
        """All prompts at once."""
        names = [self.add(prompt, max_tokens, **sampling) for prompt in prompts]
        self.finish()
        return [self.results.pop(name) for name in names]

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self.core.reset_prefix_cache(), "the prefix cache was in use"

    def close(self) -> None:
        """Free the engine, so that another can be made in this process."""
        self.core.engine_core.shutdown()
        self.runner.model = None
        del self.llm, self.core, self.inner, self.runner
        gc.collect()
