"""DeepSeek-V4.1 for vLLM: embedding, trunk, head. Runs on whatever device ``ops`` runs on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..engram import EngramOptions, EngramTables, NgramHash, Pending
from ..layer_plan import ModelPlan
from ..ops import DEAD, hc_collapse
from ..quant import Checkpoint, open_checkpoint
from ..quant.rotation import FILE as ROTATION_FILE
from ..quant.rotation import read_block
from ..upstream import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding, get_forward_context
from .compressor import Compressor
from .engram import Engram, EngramReader
from .layer import Layer
from .parameters import Norm
from .ranks import EngramRanks
from .step import Rope, Step
from .weights import load_weights


class _FastTokenizer:
    """The part of a Hugging Face fast tokenizer that the Engram token map reads."""

    def __init__(self, path: str) -> None:
        self.backend_tokenizer = Tokenizer.from_file(path)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())


class Backbone(nn.Module):
    """The trunk: token ids in, normalised hidden states out."""

    def __init__(self, vllm_config: Any, checkpoint: Checkpoint, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        dtype = vllm_config.model_config.dtype
        plan = ModelPlan.from_config(checkpoint.config)
        self.hc = config.hc_mult
        self.image_token_id = checkpoint.config["image_token_id"]
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.embed_tokens"
        )
        self.rope = Rope(config)
        self.hash, self.engram_tables, self.engram_reader = None, None, None
        if any(layer.engram is not None for layer in plan.trunk):
            self._make_engram(vllm_config, checkpoint, plan)
        sources: dict[int, Compressor] = {}
        block = read_block(checkpoint.directory / ROTATION_FILE, config.hidden_size)
        rotation = None if block is None else torch.from_numpy(block).to(self.embed_tokens.weight.device)
        layers = []
        for layer in plan.trunk:
            name, engram = f"{prefix}.layers.{layer.index}", None
            if layer.engram is not None and self.hash is not None:
                columns = self.hash.primes[layer.engram].numel()
                arguments = (config, layer.engram, columns, self.engram_reader, rotation, quant_config)
                engram = Engram(*arguments, f"{name}.engram")
            layers.append(Layer(config, layer, sources, engram, dtype, quant_config, name))
        self.layers = nn.ModuleList(layers)
        self.window_prefix = layers[0].attn.window.prefix
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

    def _make_engram(self, vllm_config: Any, checkpoint: Checkpoint, plan: ModelPlan) -> None:
        text = {**checkpoint.config["text_config"], "image_token_id": self.image_token_id}
        self.hash = NgramHash(text, _FastTokenizer(str(checkpoint.directory / "tokenizer.json")))
        options = EngramOptions.of(vllm_config.engram_config, vllm_config.additional_config)
        dim, ranks = text["engram_head_dim"], EngramRanks.of(options, self.embed_tokens.weight.device)
        layers = [(layer.index, self.hash.primes[layer.engram].cpu()) for layer in plan.trunk if layer.engram is not None]
        self.engram_tables = EngramTables(checkpoint, layers, dim, options, ranks.place)
        shard = self.engram_tables[0].shard
        dtype = vllm_config.model_config.dtype
        self.engram_reader = EngramReader(self.engram_tables, shard, ranks, dtype, options.prefetch)

    def _engram(self, input_ids: Tensor, metadata: dict[str, Any] | None, lookback: Tensor | None) -> list[Pending]:
        """Look-ups of all Engram layers. A dummy run has no token ids and looks nothing up, but takes part."""
        if self.hash is None or self.engram_reader is None:
            return []
        if metadata is None:
            layers, orders, heads = self.hash.primes.shape
            rows = torch.full((layers, len(input_ids), orders * heads), DEAD, device=input_ids.device)
        elif lookback is None:
            raise RuntimeError("the model runner gave no lookback token ids; Engram would read wrong rows")
        else:
            own = metadata[self.window_prefix]
            rows = self.hash(input_ids, own.request, own.query_start, lookback)
        return self.engram_reader.start(rows)

    def forward(
        self, input_ids: Tensor, positions: Tensor, lookback: Tensor | None, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        """input_ids, positions [T]; lookback [requests, n - 1] int32, ids before each request's first token.

        Returns hidden states [T, D]. Without attention metadata (vLLM's dummy runs) the shapes are those of
        a real step and no cache is touched.
        """
        metadata = get_forward_context().attn_metadata
        metadata = metadata if isinstance(metadata, dict) and metadata else None
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        engram = self._engram(input_ids, metadata, lookback)
        step = Step(positions.long(), input_ids == self.image_token_id, metadata, self.rope, engram)
        streams = x[:, None].expand(-1, self.hc, -1).contiguous()
        pre = torch.zeros(len(x), self.hc, dtype=torch.float32, device=x.device)
        pre[:, 0] = 1.0  # the first collapse reads stream 0 alone
        for layer in self.layers:
            streams, pre = layer(streams, pre, step)
        return self.norm(hc_collapse(streams, pre))


class DeepseekV41ForCausalLM(nn.Module):
    """The class that vLLM's registry knows. Loads Ascend checkpoints (``--quantization ascend``)."""

    allow_patterns_overrides = ("quant_model_weights*.safetensors",)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.checkpoint = open_checkpoint(vllm_config.model_config.model)
        self.model = Backbone(vllm_config, self.checkpoint, f"{prefix}.model" if prefix else "model")
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            params_dtype=torch.float32,
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.lm_head" if prefix else "lm_head",
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.logits_processor.head_dtype = None  # the head's own method computes float32 logits

    @property
    def token_lookback_depth(self) -> int:
        """How many earlier token ids of each request the runner must supply."""
        return 0 if self.model.hash is None else self.model.hash.lookback

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, D]."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        lookback_token_ids: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """vLLM's call: T tokens of all requests -> hidden states [T, D]."""
        return self.model(input_ids, positions, lookback_token_ids, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """[T, D] -> [T, vocabulary] float32."""
        return self.logits_processor(self.lm_head, hidden_states)

    def close(self) -> None:
        """Give back what the process does not give back by ending: registered memory, last."""
        if self.model.engram_tables is not None:
            self.model.engram_tables.close()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """vLLM's call: every tensor of the weight files, in any order. Returns the parameters' names."""
        return load_weights(self, self.checkpoint, weights)
