"""DeepSeek-V4.1 for vLLM: embedding, trunk, head. Runs on whatever device ``ops`` runs on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..layer_plan import ModelPlan
from ..ops import hc_collapse
from ..quant import Checkpoint, open_checkpoint
from ..quant.rotation import FILE as ROTATION_FILE
from ..quant.rotation import read_block
from ..upstream import (
    IMAGE_PLACEHOLDER,
    MULTIMODAL_REGISTRY,
    DeepseekV4VLDummyInputsBuilder,
    LogitsProcessor,
    ParallelLMHead,
    SupportsMultiModal,
    VocabParallelEmbedding,
    get_forward_context,
)
from .compressor import Compressor
from .dspark import Draft
from .engram import Engram
from .engram_memory import EngramMemory
from .image_processor import ImageInfo, ImageProcessor
from .images import Images, takes_images
from .layer import Layer, spread
from .parameters import Norm
from .step import Rope, Step
from .weights import load_weights


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
        self.engram: EngramMemory | None = None
        if any(layer.engram is not None for layer in plan.trunk):
            self.engram = EngramMemory(vllm_config, checkpoint, self.embed_tokens.weight.device)
        sources: dict[int, Compressor] = {}
        block = read_block(checkpoint.directory / ROTATION_FILE, config.hidden_size)
        rotation = None if block is None else torch.from_numpy(block).to(self.embed_tokens.weight.device)
        layers = []
        for layer in plan.trunk:
            name, engram = f"{prefix}.layers.{layer.index}", None
            if layer.engram is not None and self.engram is not None:
                engram = Engram(config, layer.engram, self.engram, rotation, quant_config, f"{name}.engram")
            layers.append(Layer(config, layer, sources, engram, dtype, quant_config, name))
        self.layers = nn.ModuleList(layers)
        self.mtp: Draft | None = None
        if vllm_config.speculative_config is not None:
            # a rotated trunk's embedding and head are of no use to the draft, which keeps the original basis
            shared = self.embed_tokens if block is None else None
            self.mtp = Draft(vllm_config, plan, shared, f"{prefix}.mtp")
        self._draft_targets = frozenset(layer.index for layer in plan.trunk if layer.draft_target)
        self.window_prefix = layers[0].attn.window.prefix
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)

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
        engram = []
        if self.engram is not None:
            own = None if metadata is None else metadata[self.window_prefix]
            engram = self.engram.start(input_ids, own, lookback)
        step = Step(positions.long(), input_ids == self.image_token_id, metadata, self.rope, engram)
        streams, pre = spread(x, self.hc)
        targets = []
        layer: Any
        for index, layer in enumerate(self.layers):
            if layer.engram is not None:
                streams = layer.engram(streams, step)
            if self.mtp is not None and index in self._draft_targets:
                targets.append(streams.mean(1))
            streams, pre = layer(streams, pre, step)
        if self.mtp is not None:
            self.mtp.observe(torch.cat(targets, dim=-1), step)
        return self.norm(hc_collapse(streams, pre))


@MULTIMODAL_REGISTRY.register_processor(ImageProcessor, info=ImageInfo, dummy_inputs=DeepseekV4VLDummyInputsBuilder)
class DeepseekV41ForCausalLM(nn.Module, SupportsMultiModal):  # type: ignore[misc]
    """The class that vLLM's registry knows. Loads Ascend checkpoints (``--quantization ascend``).

    Tokens of pictures come as embeddings, and their ids beside them: routers and Engram ask which tokens are images.
    """

    allow_patterns_overrides = ("quant_model_weights*.safetensors",)
    requires_raw_input_tokens = True
    supports_encoder_tp_data = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.checkpoint = open_checkpoint(vllm_config.model_config.model)
        self.images: Images | None = None
        if takes_images(vllm_config.model_config):
            self.images = Images(config, vllm_config.model_config.dtype)
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
        return 0 if self.model.engram is None else self.model.engram.hash.lookback

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What stands for a picture in a prompt's text."""
        if modality != "image":
            raise ValueError(f"DeepSeek-V4.1 reads text and images, not {modality}")
        return str(IMAGE_PLACEHOLDER)

    def embed_multimodal(self, **inputs: Any) -> Sequence[Tensor]:
        """vLLM's call: spans of pictures, each [tokens of it, D]; see ``Images.forward``."""
        if inputs.get("patches") is None:
            return []
        if self.images is None:
            raise RuntimeError("a picture came to a model without vision tower")
        spans: Sequence[Tensor] = self.images(inputs["patches"], inputs["vit_grid"], inputs["types"])
        return spans

    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: Sequence[Tensor] | None = None,
        *,
        is_multimodal: Tensor | None = None,
    ) -> Tensor:
        """[T] -> [T, D]. ``multimodal_embeddings``: of the tokens that ``is_multimodal`` [T] marks, in their order."""
        x: Tensor = self.model.embed_tokens(input_ids)
        if multimodal_embeddings and is_multimodal is not None:
            x[is_multimodal] = torch.cat(list(multimodal_embeddings)).to(x.dtype)
        return x

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

    def draft(self, anchors: Tensor, last: Tensor, tables: dict[str, Tensor], size: int) -> tuple[Tensor, Tensor]:
        """Hidden states [R * size, D] and logits [R * size, vocabulary] of drafted blocks, Markov bias not included:
        see ``Draft.forward``."""
        mtp = self.model.mtp
        assert mtp is not None
        hidden, normed = mtp(anchors, last, tables, size)
        return hidden, self.logits_processor(mtp.head or self.lm_head, normed)

    def close(self) -> None:
        """Give back what the process does not give back by ending: registered memory, last."""
        if self.model.engram is not None:
            self.model.engram.close()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """vLLM's call: every tensor of the weight files, in any order. Returns the parameters' names."""
        return load_weights(self, self.checkpoint, weights)
