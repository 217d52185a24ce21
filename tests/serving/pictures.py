"""Pictures in prompts: golden ones and others, and what the reference makes of them."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from serving.harness import Engine, Result
from vllm_ascend_dsv41.reference import Model, State
from vllm_ascend_dsv41.upstream import DeepseekV4VLProcessingInfo

IMAGE = 383  # the image id of preset a, the last of its vocabulary


@dataclass
class Prompt:
    """``short``: one placeholder per picture, as a tokenizer gives it; ``full``: with spans."""

    short: list[int]
    full: list[int]
    types: Tensor  # [L]: -1 text, 0 start, 1 image, 2 newline, 3 end
    pictures: list[Any]

    @property
    def request(self) -> dict[str, Any]:
        """As vLLM takes it."""
        return {"prompt_token_ids": self.short, "multi_modal_data": {"image": self.pictures}}

    def span(self, number: int = 0) -> range:
        """Positions of a picture."""
        start = (self.types == 0).nonzero()[number].item()
        return range(start, (self.types == 3).nonzero()[number].item() + 1)


def of_golden(case: dict[str, Tensor], official: dict[str, Tensor]) -> Prompt:
    """The prompt of a golden file."""
    types = case["token_types"]
    full = case["input_ids"].tolist()
    short = [token for token, kind in zip(full, types.tolist(), strict=True) if kind in (-1, 0)]
    names = sorted(name for name in official if name.endswith(".png"))
    pictures = [Image.open(io.BytesIO(official[name].numpy().tobytes())) for name in names]
    return Prompt(short, full, types, pictures)


def picture(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Any:
    """A random picture."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def compose(served: Engine, parts: list[Any], after: list[int] | None = None) -> Prompt:
    """A prompt of token ids and pictures in the given order; ``after``: tokens that follow, as if generated."""
    info = processing_info(served)
    short, full, types, pictures = [], [], [], []
    for part in [*parts, after or []]:
        if isinstance(part, list):
            short, full, types = [*short, *part], [*full, *part], [*types, *[-1] * len(part)]
            continue
        roles = info.get_hf_processor()(images=[part])["types"].tolist()
        short, full, types = [*short, IMAGE], [*full, *[IMAGE] * len(roles)], [*types, *roles]
        pictures.append(part)
    return Prompt(short, full, torch.tensor(types), pictures)


def processing_info(served: Engine) -> Any:
    """vLLM's processor of the engine's model."""
    from vllm.multimodal.processing import InputProcessingContext

    config = served.core.model_config
    return DeepseekV4VLProcessingInfo(InputProcessingContext(config, tokenizer=None))


def wanted(model: Model, served: Engine, prompt: Prompt) -> Tensor:
    """The reference's logits [L, vocabulary], from patches that vLLM made: test_patches compares those with golden."""
    encoded = []
    for one in prompt.pictures:
        made = processing_info(served).get_hf_processor()(images=[one])
        grid = tuple(made["vit_grid"][0].tolist())
        encoded.append(model.vision.align(model.vision.tower(made["patches"].to(model.dtype), grid), grid))
    tokens = torch.tensor(prompt.full)
    return model(tokens, State(), model.merge_images(tokens, prompt.types, encoded)).logits


def ask(served: Engine, prompt: Prompt, max_tokens: int = 1, **sampling: Any) -> str:
    """Queue a request; returns its name."""
    from vllm import SamplingParams

    name = served.name()
    served.results[name] = Result(list(prompt.full))
    options = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **sampling}
    served.core.add_request(name, prompt.request, SamplingParams(**options))
    return name


def text(length: int, seed: int) -> list[int]:
    """Random tokens without special ones."""
    source = random.Random(seed)
    return [source.randrange(3, 370) for _ in range(length)]
