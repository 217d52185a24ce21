"""How far two sets of logits lie apart, in the measures of golden/README.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def rms(found: Tensor, wanted: Tensor) -> float:
    """Relative RMS difference of everything together."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@dataclass(frozen=True)
class Distance:
    """Of logits [rows, vocabulary]."""

    rms: float
    cos_mean: float
    kl_mean: float
    top1: float
    max_abs: float


def distance(found: Tensor, wanted: Tensor) -> Distance:
    """All rows together."""
    found, wanted = found.double(), wanted.double()
    p, q = wanted.log_softmax(-1), found.log_softmax(-1)
    return Distance(
        rms(found, wanted),
        float(torch.nn.functional.cosine_similarity(found, wanted, dim=-1).mean()),
        float((p.exp() * (p - q)).sum(-1).mean()),
        float((found.argmax(-1) == wanted.argmax(-1)).double().mean()),
        float((found - wanted).abs().max()),
    )


@dataclass(frozen=True)
class Tolerance:
    """Suggested tolerances of golden/README.md, per file."""

    rms: float
    cos_mean: float
    kl_mean: float
    top1: float
    max_abs: float = torch.inf

    def holds(self, d: Distance) -> bool:
        """Whether a distance is within all of them."""
        return (
            d.rms <= self.rms
            and d.cos_mean >= self.cos_mean
            and d.kl_mean <= self.kl_mean
            and d.top1 >= self.top1
            and d.max_abs <= self.max_abs
        )


FP32 = Tolerance(1e-5, 0.9999999, 1e-8, 1.0, 1e-3)
BF16 = Tolerance(0.05, 0.9985, 0.015, 0.90)
MX = Tolerance(0.08, 0.997, 0.03, 0.85)
INT8 = Tolerance(0.05, 0.9985, 0.015, 0.90)
