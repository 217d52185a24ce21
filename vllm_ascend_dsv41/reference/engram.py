"""Engram: hashed n-grams of normalised tokens, looked up in a large table and gated into the streams.

Source: spec section 3.9 (token map, primes, multipliers, hash and gate).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from .config import Config

DEAD = -1  # compressed id of an image token: it hides itself and everything before it


def token_map(tokenizer: Tokenizer) -> Tensor:
    """Token id -> compressed id [vocab] int64: ids that read the same up to case, accents and space."""
    sentinel = "\ue000"  # keeps a token that is exactly one space from being stripped away
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), sentinel),
            normalizers.Strip(),
            normalizers.Replace(sentinel, " "),
        ]
    )
    seen: dict[str, int] = {}
    ids = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # U+FFFD: part of a multi-byte character, which has no text of its own
        key = str(tokenizer.id_to_token(token)) if "\ufffd" in text else (normalizer.normalize_str(text) or text)
        ids.append(seen.setdefault(key, len(seen)))
    return torch.tensor(ids)


def _is_prime(value: int) -> bool:
    return value > 1 and all(value % d for d in range(2, math.isqrt(value) + 1))


@dataclass
class HashConstants:
    """Per Engram layer: ``multipliers`` [n], ``primes`` [n - 1, heads], ``offsets`` [(n - 1) * heads]."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


def hash_constants(config: Config) -> dict[int, HashConstants]:
    """The hash functions of every Engram layer, recomputed from the config."""
    seen: set[int] = set()
    result = {}
    for layer in config.engram_layer_ids:
        primes: list[int] = []
        for _ in range(config.engram_max_ngram_size - 1):
            value = config.engram_vocab_size - 1  # every order of n-gram starts its search here again
            for _ in range(config.engram_n_heads):
                value += 1
                while value in seen or not _is_prime(value):
                    value += 1
                seen.add(value)
                primes.append(value)
        bound = max(1, (2**63 - 1) // config.engram_compressed_vocab_size // 2)
        random = np.random.default_rng(10007 * layer)
        multipliers = random.integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64) * 2 + 1
        table = torch.tensor(primes)
        result[layer] = HashConstants(
            torch.from_numpy(multipliers), table.view(-1, config.engram_n_heads), table.cumsum(0) - table
        )
    return result


def hash_rows(compressed: Tensor, constants: HashConstants, pad: int) -> Tensor:
    """Table rows of every position of a sequence from its start.

    ``compressed``: [L] int64 compressed ids, ``DEAD`` for image tokens. Returns [L, columns] int64;
    rows of dead positions mean nothing (their gate is zero).
    """
    length = compressed.numel()
    rolling = torch.zeros(length, dtype=torch.int64)
    blocked = torch.zeros(length, dtype=torch.bool)
    columns = []
    for back, multiplier in enumerate(constants.multipliers):
        ids = torch.cat((torch.full((min(back, length),), DEAD), compressed[: max(length - back, 0)]))
        blocked |= ids == DEAD  # sticky: what lies behind an image is hidden too
        rolling ^= torch.where(blocked, pad, ids) * multiplier
        if back:
            columns.append(rolling[:, None] % constants.primes[back - 1])
    return torch.cat(columns, dim=1) + constants.offsets


def gate(streams: Tensor, key: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """How much of the value each stream takes: streams, key [L, hc, D] -> [L, hc] float32."""
    x, k = streams.float(), key.float()
    dot = (x * (q_weight * k_weight) * k).sum(-1)
    dot = dot * torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(k.square().mean(-1) + eps)
    dot = dot * x.shape[-1] ** -0.5
    return torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))


def load_token_map(directory: Path) -> Tensor:
    """The token map of the checkpoint's own tokenizer."""
    return token_map(Tokenizer.from_file(str(directory / "tokenizer.json")))
