"""Table rows of every token, a pure function of its request's token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import upstream
from ..ops import DEAD, Batch, ngram_rows


class EngramConfigError(ValueError):
    """The config's Engram numbers contradict the tokenizer or each other."""


def hash_primes(layers: int, orders: int, heads: int, vocab_size: int) -> Tensor:
    """Bucket counts [layers, orders, heads] int64: ascending primes, none used twice (spec section 3.9)."""
    seen: set[int] = set()
    values = []
    for _ in range(layers * orders):
        prime = vocab_size - 1  # every order starts its search here again
        for _ in range(heads):
            prime = upstream.find_next_prime(prime, seen)
            seen.add(prime)
            values.append(prime)
    return torch.tensor(values).view(layers, orders, heads)


class NgramHash(nn.Module):
    """The hash functions of all Engram layers of one checkpoint.

    ``config``: fields of the text config; ``tokenizer``: the checkpoint's own, a Hugging Face fast
    tokenizer. Raises EngramConfigError when table sizes or the compressed vocabulary differ from the
    config: a wrong constant would give plausible text and wrong memory.
    """

    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, config: Mapping[str, Any], tokenizer: Any) -> None:
        super().__init__()
        layers: Sequence[int] = config["engram_layer_ids"]
        self.orders = config["engram_max_ngram_size"]
        mapping, size = upstream.build_compressed_token_map(tokenizer)
        if size != config["engram_compressed_vocab_size"]:
            raise EngramConfigError(
                f"the tokenizer has {size} distinct normalised tokens, config.json says "
                f"engram_compressed_vocab_size = {config['engram_compressed_vocab_size']}; "
                "use the tokenizer that belongs to the checkpoint"
            )
        primes = hash_primes(len(layers), self.orders - 1, config["engram_n_heads"], config["engram_vocab_size"])
        rows = primes.flatten(1).sum(1).tolist()
        if rows != list(config["engram_num_embeddings"]):
            raise EngramConfigError(
                f"config.json: engram_num_embeddings = {config['engram_num_embeddings']}, "
                f"the hash functions address {rows} rows"
            )
        # ids that the embedding has and the tokenizer has not mean nothing
        unknown = max(config.get("vocab_size", 0) - len(mapping), 0)
        token_map = torch.cat((torch.tensor(mapping), torch.full((unknown,), DEAD)))
        self.pad = int(token_map[config["engram_pad_token_id"]])
        image = config.get("image_token_id")
        if image is not None and image < len(token_map):
            token_map[image] = DEAD
        columns = primes.flatten(1)
        self.register_buffer("token_map", token_map, persistent=False)
        multipliers = upstream.compute_hash_multipliers(tuple(layers), self.orders, size)
        self.register_buffer("multipliers", multipliers.to(torch.int64), persistent=False)
        self.register_buffer("primes", primes, persistent=False)
        self.register_buffer("offsets", columns.cumsum(1) - columns, persistent=False)

    @property
    def lookback(self) -> int:
        """How many tokens before its own a token needs."""
        return int(self.orders) - 1

    def forward(self, token_ids: Tensor, batch: Batch, lookback: Tensor) -> Tensor:
        """Rows of every token: token_ids [T]; lookback [R or more, n - 1] int32, the ids before each request's first
        token of this step, newest first, -1 where there is none. Returns [layers, T, columns] int64."""
        constants = self.multipliers, self.primes, self.offsets, self.pad
        return ngram_rows(token_ids, self.token_map, lookback, batch.query_start, *constants)
