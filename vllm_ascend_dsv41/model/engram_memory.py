"""From token ids to the rows of all Engram layers: hash, tables, and the gathering among ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from ..cache import RowMetadata
from ..engram import EngramOptions, EngramTables, NgramHash, Pending, Prefetcher
from ..ops import DEAD
from ..quant import Checkpoint
from ..upstream import get_forward_context, get_tensor_model_parallel_world_size, tensor_model_parallel_all_gather
from .ranks import EngramRanks


class _FastTokenizer:
    """The part of a Hugging Face fast tokenizer that the Engram token map reads."""

    def __init__(self, path: str) -> None:
        self.backend_tokenizer = Tokenizer.from_file(path)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())


class EngramMemory(nn.Module):
    """Looks the rows of all Engram layers up. Each rank has whole hash columns; their rows are gathered.

    ``device``: where token ids are. Made before the weights load: the tables are there then, and zero.
    """

    def __init__(self, vllm_config: Any, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__()
        text = {**checkpoint.config["text_config"], "image_token_id": checkpoint.config["image_token_id"]}
        self.hash = NgramHash(text, _FastTokenizer(str(checkpoint.directory / "tokenizer.json")))
        self.columns = self.hash.primes[0].numel()
        options = EngramOptions.of(vllm_config.engram_config, vllm_config.additional_config)
        self._ranks = EngramRanks.of(options, device)
        trunk = [layer for layer in checkpoint.plan.trunk if layer.engram is not None]
        layers = [(layer.index, self.hash.primes[layer.engram].cpu()) for layer in trunk]
        self.tables = EngramTables(checkpoint, layers, text["engram_head_dim"], options, self._ranks.place)
        shard = self.tables[0].shard  # its columns are those of every layer
        self._own = slice(shard.first_column, shard.first_column + shard.columns)
        self._dtype = vllm_config.model_config.dtype
        self._prefetcher = Prefetcher(device, options.prefetch)

    def close(self) -> None:
        """Give the tables back, after look-ups that are under way."""
        self._prefetcher.close()
        self.tables.close()

    def start(self, input_ids: Tensor, step: RowMetadata | None, lookback: Tensor | None) -> list[Pending]:
        """A look-up for every Engram layer. input_ids [T]; lookback [requests, n - 1] int32, ids before each request's
        first token; ``step`` None: a dummy run, whose tokens look nothing up, but which takes part.

        Where columns are divided among data-parallel ranks, each looks up for the tokens of all: every rank must come
        here in every step, also one without requests.
        """
        layers = len(self.hash.primes)
        if step is None:
            rows = torch.full((layers, len(input_ids), self.columns), DEAD, device=input_ids.device)
        elif lookback is None:
            raise RuntimeError("the model runner gave no lookback token ids; Engram would read wrong rows")
        else:
            rows = self.hash(input_ids, step.batch, lookback)
        if self._ranks.divided is not None:
            flat = rows.transpose(0, 1).flatten(1).contiguous()
            flat = self._ranks.divided.all_gatherv(flat, 0, self._tokens())
            rows = flat.view(-1, layers, self.columns).transpose(0, 1)
        return [
            self._prefetcher.start(partial(self._look_up, number), rows[number, :, self._own])
            for number in range(layers)
        ]

    def _look_up(self, number: int, rows: Tensor) -> Tensor:
        return self.tables[number].lookup(rows, self._dtype)

    def finish(self, pending: Pending) -> Tensor:
        """[T, columns, dim], for the tokens of this rank."""
        values = pending.wait()
        divided = self._ranks.divided
        if divided is not None:
            tokens, rank = self._tokens(), divided.rank_in_group
            first = sum(tokens[:rank])
            values = divided.all_gather(values.contiguous(), dim=1)[first : first + tokens[rank]]
        if get_tensor_model_parallel_world_size() > 1:
            values = tensor_model_parallel_all_gather(values.contiguous(), dim=1)
        return values

    def _tokens(self) -> list[int]:
        """Of each data-parallel rank that shares the division, in this step."""
        divided = self._ranks.divided
        every: list[int] = get_forward_context().dp_metadata.num_tokens_across_dp_cpu.tolist()
        first = self._ranks.data_parallel_rank // divided.world_size * divided.world_size
        return every[first : first + divided.world_size]
