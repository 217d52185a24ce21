"""From pictures to patches, and from a placeholder to a span of tokens: vLLM's own, for the image id of any config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..upstream import (
    IMAGE_PLACEHOLDER,
    DeepseekV4VLMultiModalProcessor,
    DeepseekV4VLProcessingInfo,
    PromptReplacement,
    PromptUpdateDetails,
)

IMAGE_START, IMAGE, IMAGE_NEW_LINE, IMAGE_END = range(4)  # roles of a span's tokens, as vLLM's processor numbers them


class ImageInfo(DeepseekV4VLProcessingInfo):  # type: ignore[misc]
    """vLLM's takes every checkpoint for one with a vision tower."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Pictures of any number, or nothing."""
        limits: Mapping[str, int | None] = super().get_supported_mm_limits()
        return limits if self.get_hf_config().vision_n_layers else {}


class ImageProcessor(DeepseekV4VLMultiModalProcessor):  # type: ignore[misc]
    """vLLM's looks for the released model's image id, 129264; a tiny vocabulary has another."""

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        """One placeholder becomes a span of as many image ids as the picture has tokens."""
        image = self.info.get_hf_config().image_token_id
        found = self.info.get_image_placeholder_token_id()
        if found != image:
            raise ValueError(
                f"the tokenizer gives {IMAGE_PLACEHOLDER!r} the id {found}, config.json says image_token_id = {image}; "
                "use the tokenizer that belongs to the checkpoint"
            )

        def span(item: int) -> Any:
            tokens = out_mm_kwargs["image"][item]["types"].data.numel()
            return PromptUpdateDetails.select_token_id([image] * tokens, image)

        return [PromptReplacement(modality="image", target=[image], replacement=span)]
