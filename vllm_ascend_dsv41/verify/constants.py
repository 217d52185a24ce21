"""Numbers of the Engram hash, recomputed: a wrong one gives plausible text and wrong memory."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from ..quant import Checkpoint
from ..reference.config import Config
from ..reference.engram import hash_constants, token_map
from .report import Report


def check_constants(checkpoint: Checkpoint, report: Report) -> None:
    """Table sizes against the primes, compressed vocabulary against the tokenizer, multipliers against their bound."""
    config = Config.load(checkpoint.directory)
    if not config.engram_layer_ids:
        report.skip("constants", "the model has no Engram layers")
        return
    problems = _tables(config) + _vocabulary(checkpoint.directory / "tokenizer.json", config)
    layers = ", ".join(map(str, config.engram_layer_ids))
    report.add("constants", problems, f"primes, multipliers and compressed vocabulary of layers {layers} recomputed")


def _tables(config: Config) -> list[str]:
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    least = config.engram_vocab_size * columns  # every prime is larger than engram_vocab_size, or equal
    if any(not least <= rows <= 2 * least + 1000 * columns for rows in config.engram_num_embeddings):
        found = list(config.engram_num_embeddings)
        return [f"engram_num_embeddings = {found}, {columns} columns of about {config.engram_vocab_size} need {least}"]
    problems, constants = [], hash_constants(config)
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        total = int(constants[layer].primes.sum())
        if total != rows:
            problems.append(f"layer {layer}: engram_num_embeddings = {rows}, its primes sum up to {total}")
        multipliers = constants[layer].multipliers.tolist()
        largest = max(multipliers) * (config.engram_compressed_vocab_size - 1)
        if any(value % 2 == 0 for value in multipliers) or largest >= 2**63:
            problems.append(f"layer {layer}: a hash multiplier is even or overflows")
    return problems


def _vocabulary(path: Path, config: Config) -> list[str]:
    if not path.is_file():
        return ["tokenizer.json is missing; copy it from the source"]
    try:
        size = len(token_map(Tokenizer.from_file(str(path))).unique())
    except Exception as error:  # the library raises nothing more precise
        return [f"tokenizer.json cannot be read ({error}); copy it from the source"]
    if size != config.engram_compressed_vocab_size:
        return [
            f"engram_compressed_vocab_size = {config.engram_compressed_vocab_size}, the tokenizer has {size} distinct "
            "normalised tokens; use the tokenizer of this checkpoint"
        ]
    return []
