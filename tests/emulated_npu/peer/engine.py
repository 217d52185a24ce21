"""vllm-ascend 0.30.0rc2's own DeepSeek-V4.1 in a vLLM engine on the emulated NPU, with taps.

One request at a time can be forced along given tokens; logits, hidden states, selections and drafts are kept by
position. Runs inside the emulated environment only.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DSPARK = {"method": "dspark", "num_speculative_tokens": 5}
GRAPHS = {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0, "cudagraph_capture_sizes": [1, 2, 4]}


@dataclass
class Trace:
    """What one request computed, by position of the token that a row belongs to."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)  # rc2's own, for rows that were sampled from
    hidden: dict[int, Tensor] = field(default_factory=dict)  # what its head reads; prefill only in graph mode
    layers: dict[str, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)  # (position of the anchor, drafts behind it)
    cached: int = 0

    def rows(self, kind: dict[int, Tensor], positions: range) -> Tensor:
        return torch.stack([kind[p] for p in positions])


class Engine:
    """runner: "v1" or "v2"."""

    def __init__(self, model: str, runner: str = "v1", graphs: bool = False, **options: Any) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
        from vllm import LLM

        defaults: dict[str, Any] = {
            "dtype": "bfloat16",
            "enforce_eager": not graphs,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "gpu_memory_utilization": 0.05,
            "num_gpu_blocks_override": 64,
            "block_size": 128,
            "enable_prefix_caching": False,
            "limit_mm_per_prompt": {"image": 0},
            "seed": 0,
            "disable_log_stats": True,
            "skip_tokenizer_init": True,
            "async_scheduling": False,  # otherwise the scheduler knows drafts as -1 only
        }
        if graphs:
            defaults["compilation_config"] = dict(GRAPHS)
        self.llm = LLM(model=model, **{**defaults, **options})
        inner = self.llm.llm_engine.engine_core.engine_core
        self.worker = inner.model_executor.driver_worker.worker
        self.runner = self.worker.model_runner
        self.model = self.runner.get_model()
        self.trace: Trace | None = None
        self._forced: list[int] = []
        self._tokens = 0  # of the step that is being computed
        self._end = 0  # position behind the last of them
        self._drafted: list[int] = []
        self.accept: Callable[[int], int] | None = None
        self._step = 0
        self._tap()

    def _tap(self) -> None:
        forward, logits, execute = self.model.forward, self.model.compute_logits, self.worker.execute_model

        def tapped_forward(input_ids: Tensor, positions: Tensor, *arguments: Any, **keywords: Any) -> Any:
            result = forward(input_ids, positions, *arguments, **keywords)
            if self.trace is not None and self._tokens:
                hidden = (result[0] if isinstance(result, tuple) else result)[: self._tokens].cpu()
                self.trace.hidden.update(zip(positions[: self._tokens].tolist(), hidden, strict=True))
            return result

        def tapped_logits(hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
            result = logits(hidden, *arguments, **keywords)
            return (
                result if self.trace is None or result is None or not self._tokens else self._force(self.trace, result)
            )

        def tapped_execute(scheduled: Any, *arguments: Any, **keywords: Any) -> Any:
            self._tokens = scheduled.total_num_scheduled_tokens
            if self.trace is not None and self._tokens:
                running = scheduled.scheduled_cached_reqs
                new = scheduled.scheduled_new_reqs
                begin = new[0].num_computed_tokens if new else running.num_computed_tokens[0]
                self._end = begin + self._tokens
                drafts = list(scheduled.scheduled_spec_decode_tokens.values())
                self._drafted = list(drafts[0]) if drafts else []
                if -1 in self._drafted:  # runner V2 keeps its drafts on the device
                    states = self.runner.req_states
                    row = states.req_id_to_index[running.req_ids[0]]
                    self._drafted = states.draft_tokens[row, : len(self._drafted)].tolist()
                if self._drafted:
                    self.trace.drafts.append((begin, self._drafted))
            return execute(scheduled, *arguments, **keywords)

        self.model.forward, self.model.compute_logits, self.worker.execute_model = (
            tapped_forward,
            tapped_logits,
            tapped_execute,
        )

    def _force(self, trace: Trace, logits: Tensor) -> Tensor:
        """Keeps the rows and makes the sampler take the forced tokens: row j predicts the token behind position p."""
        out = logits.clone()
        rows = logits.shape[0]
        self._step += 1
        accepted = self.accept(self._step) if self.accept else rows
        for j in range(rows):
            position = self._end - rows + j
            at = position - (len(trace.prompt) - 1)
            if at < 0:
                continue
            if j <= accepted:
                trace.logits[position] = logits[j].float().cpu()
            token = self._forced[at] if at < len(self._forced) else None
            if self.accept is not None:
                token = self._accepting(logits[j], j, accepted)
            if token is not None:
                out[j] = -1e4
                out[j, token] = 0.0
        return out

    def _accepting(self, row: Tensor, j: int, accepted: int) -> int:
        """Row j agrees with its draft while j < accepted, then disagrees once."""
        if j < len(self._drafted) and j < accepted:
            return self._drafted[j]
        token = int(row.argmax())
        return token if j >= len(self._drafted) or token != self._drafted[j] else (token + 7) % 300 + 5

    def run(self, prompt: list[int], forced: list[int] | None = None, tokens: int = 25, **sampling: Any) -> Trace:
        """One request; forced: the tokens it shall take, whatever it computes."""
        from vllm import SamplingParams

        trace = Trace(list(prompt))
        self.trace, self._forced = trace, list(forced or [])
        parameters = SamplingParams(
            **{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, **sampling}
        )
        output = self.llm.generate([{"prompt_token_ids": list(prompt)}], parameters, use_tqdm=False)[0]
        self.trace = None
        trace.tokens = list(output.outputs[0].token_ids)
        trace.cached = output.num_cached_tokens or 0
        return trace

    def generate(self, prompts: list[list[int]], tokens: int, **sampling: Any) -> list[list[int]]:
        """All prompts together, untouched."""
        from vllm import SamplingParams

        parameters = SamplingParams(
            **{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, **sampling}
        )
        outputs = self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], parameters, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]
