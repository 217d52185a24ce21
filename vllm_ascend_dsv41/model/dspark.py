"""DSpark: the draft model that lives in the checkpoint's ``mtp`` blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layer_plan import ModelPlan
from ..ops import Blocks, Rotation, block_attention, hc_collapse
from ..upstream import ParallelLMHead, VocabParallelEmbedding
from .attention import Attention
from .layer import Layer, spread
from .parameters import FloatMatrix, Norm, QuantizingNorm
from .step import Rope, Step


class DraftAttention(Attention):
    """Attention of one stage: its window holds rows of what the trunk saw, which the trunk's forward pass writes.

    The tokens of a block see all of the window and all of the block, later ones too. Their own rows are never stored:
    what is rejected leaves nothing behind, and drafting needs no slots beyond the verified tokens.
    """

    def _plan_window(self, arguments: tuple[int, int, int]) -> None:
        """Blocks are listed by position, and planned when they are drafted."""

    def observe(self, main: Any, step: Step, metadata: dict[str, Any]) -> None:
        """Store the rows of this step's tokens: main [T, D], or ``Quantized`` where ``input_quantized``."""
        own, rope = metadata[self.window.prefix], step.rope(compressed=False)
        self.store(None, self.project(main)[1], rope, self.window.kv_cache, own.slot_mapping)

    def _attend(self, q: Tensor, kv: Tensor, rope: Rotation, step: Step, metadata: dict[str, Any]) -> Tensor:
        table, rows = metadata["tables"][self.window.prefix], kv.new_empty(1, *kv.shape)
        q = self.store(q, kv, rope, rows, None)
        own = self.window.kv_cache, table, self.window_size
        return block_attention(q, rows[0], metadata["blocks"], *own, self.attn_sink, self.scale)


class Draft(nn.Module):
    """All stages; submodules ``0``, ``1``, ... are called as in the checkpoint (``mtp.0``).

    ``shared``: the trunk's embedding, when the draft may use it and the trunk's head; None: it has its own copies.
    Source: spec section 3.10.
    """

    def __init__(self, vllm_config: Any, plan: ModelPlan, shared: nn.Module | None, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        dtype, hidden, vocabulary = vllm_config.model_config.dtype, config.hidden_size, config.vocab_size
        targets = sum(layer.draft_target for layer in plan.trunk)
        self.noise_token_id, self.hc = config.dspark_noise_token_id, config.hc_mult
        self.rope = Rope(config)
        self.main_proj = FloatMatrix(targets * hidden, hidden, dtype)
        self.stages: list[Layer] = []
        for stage, layer in enumerate(plan.draft):
            built = Layer(config, layer, {}, None, dtype, quant_config, f"{prefix}.{stage}", DraftAttention)
            self.add_module(str(stage), built)
            self.stages.append(built)
        codes = all(stage.attn.input_quantized for stage in self.stages)
        self.main_norm = (QuantizingNorm if codes else Norm)(hidden, config.rms_norm_eps)
        self.norm = Norm(hidden, config.rms_norm_eps)
        # whole on every rank: a block's tokens are drawn one after another, and a collective for each would cost more
        self.markov_embed = FloatMatrix(config.dspark_markov_rank, vocabulary, dtype)
        self.markov_head = FloatMatrix(config.dspark_markov_rank, vocabulary, dtype)
        self.confidence_head = FloatMatrix(hidden + config.dspark_markov_rank, 1, dtype)
        self.head: ParallelLMHead | None = None
        if shared is None:
            self.embed_tokens = VocabParallelEmbedding(
                vocabulary, hidden, quant_config=quant_config, prefix=f"{prefix}.embed_tokens"
            )
            self.head = ParallelLMHead(
                vocabulary, hidden, params_dtype=torch.float32, quant_config=quant_config, prefix=f"{prefix}.head"
            )
        self._embed = (shared or self.embed_tokens,)  # in a tuple: a shared one stays the trunk's module

    @property
    def window_prefixes(self) -> list[str]:
        """Names of the stages' window caches."""
        return [stage.attn.window.prefix for stage in self.stages]

    def observe(self, targets: Tensor, step: Step) -> None:
        """Give the stages the trunk's view of this step's tokens: targets [T, targets * D], mean streams at the inputs
        of the target layers. Drafted tokens are among them; rows of rejected ones are overwritten, like the trunk's.
        """
        if step.metadata is None:
            return
        main = self.main_norm(self.main_proj(targets))
        for stage in self.stages:
            attention: Any = stage.attn
            attention.observe(main, step, step.metadata)

    def forward(self, anchors: Tensor, last: Tensor, tables: dict[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Draft ``size`` tokens for each of R requests.

        anchors: [R] int64 on the host, the newest token of each, which the trunk has not seen; last: [R] int64 on the
        host, position of the token before it; tables: block table [R, blocks] of each stage's window, empty in idle
        steps, whose caches are not touched. Returns the collapsed streams [R * size, D] before and after the final
        norm.
        """
        tokens = torch.full((len(anchors), size), self.noise_token_id, dtype=torch.long)
        tokens[:, 0] = anchors
        both = torch.stack((tokens, last[:, None] + torch.arange(1, size + 1)))
        tokens, positions = both.to(self.main_proj.weight.device).flatten(1)  # one transfer
        text = torch.zeros_like(positions, dtype=torch.bool)
        blocks = {"blocks": Blocks(last, size), "tables": tables} if tables else None
        step = Step(positions, text, blocks, self.rope)
        streams, pre = spread(self._embed[0](tokens), self.hc)
        for stage in self.stages:
            streams, pre = stage(streams, pre, step)
        hidden = hc_collapse(streams, pre)
        return hidden, self.norm(hidden)

    def markov_bias(self, previous: Tensor) -> Tensor:
        """What a token [R] adds to the logits of the next: [R, vocabulary] float32."""
        return self.markov_head(self.markov_embed.weight.index_select(0, previous), torch.float32)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logit of a drafted token being accepted: hidden [R, D] before the norm, previous [R] the token in front of
        it -> [R] float32."""
        features = torch.cat((hidden, self.markov_embed.weight.index_select(0, previous)), dim=-1)
        return self.confidence_head(features, torch.float32)[:, 0]
