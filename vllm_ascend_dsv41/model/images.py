"""Pictures of a prompt: vLLM's vision tower, and the embeddings of every token of a picture's span."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..quantization.linear import FloatLinear
from ..upstream import (
    DeepseekV4Aligner,
    DeepseekV4ViT,
    LinearBase,
    get_tensor_model_parallel_world_size,
    is_vit_use_data_parallel,
    run_dp_sharded_vision_tower,
)
from .image_processor import IMAGE, IMAGE_END, IMAGE_NEW_LINE, IMAGE_START
from .parameters import empty


def takes_images(model_config: Any) -> bool:
    """Whether the checkpoint has a vision tower, and no option says that it is not wanted."""
    multimodal = model_config.multimodal_config
    has_tower = getattr(model_config.hf_config, "vision_n_layers", 0) > 0
    return has_tower and multimodal is not None and multimodal.get_limit_per_prompt("image") > 0


class Images(nn.Module):
    """ViT, aligner and the three learned delimiters. Source: spec section 3.11, vLLM's deepseek_v4.common.vision.

    The tower is divided among tensor-parallel ranks; with ``--mm-encoder-tp-mode data`` each rank has all of it and
    encodes its share of the pictures. Weights stay in the model's dtype, whatever the text model is quantised to.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.divided = is_vit_use_data_parallel(config.vision_n_heads) and get_tensor_model_parallel_world_size() > 1
        self.vision, self.aligner = DeepseekV4ViT(config).to(dtype), DeepseekV4Aligner(config).to(dtype)
        for module in self.modules():
            if isinstance(module, LinearBase):  # upstream's method for CPUs wants rows that the aligner does not have
                module.quant_method = FloatLinear()
        self.image_start, self.image_newline, self.image_end = (empty(config.hidden_size) for _ in range(3))

    def forward(self, patches: Tensor, vit_grid: Tensor, types: Tensor) -> tuple[Tensor, ...]:
        """Spans of the pictures, each [tokens of it, D] in the tower's dtype.

        patches [sum of rows x columns, 3, p, p]; vit_grid [pictures, 2] int64, rows and columns of patches; types [sum
        of tokens] int64: start, image, newline or end.
        """
        patches, grids = patches.to(self.aligner.w1.weight.dtype), vit_grid.tolist()
        if self.divided:
            pictures = run_dp_sharded_vision_tower(self.vision, self.aligner, patches, grids)
        else:
            parts = patches.split([rows * columns for rows, columns in grids])
            pictures = [self.aligner(self.vision(part, *grid), *grid) for part, grid in zip(parts, grids, strict=True)]
        lengths = [_tokens(rows, columns, self.aligner.downsample_ratio) for rows, columns in grids]
        roles = types.to(patches.device).split(lengths)
        return tuple(self._span(picture, role) for picture, role in zip(pictures, roles, strict=True))

    def _span(self, picture: Tensor, types: Tensor) -> Tensor:
        span = picture.new_empty(len(types), picture.shape[-1])
        delimiters = {IMAGE_START: self.image_start, IMAGE_NEW_LINE: self.image_newline, IMAGE_END: self.image_end}
        for kind, value in delimiters.items():
            span[types == kind] = value.to(span.dtype)
        span[types == IMAGE] = picture
        return span


def _tokens(rows: int, columns: int, ratio: int) -> int:
    """Tokens of the span of a picture of so many patches."""
    return -(-rows // ratio) * (-(-columns // ratio) + 1) + 2
