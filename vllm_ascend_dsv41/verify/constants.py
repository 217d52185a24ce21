"""Numbers of the Engram hash, recomputed: a wrong one gives plausible text and wrong memory."""

from __future__ import annotations

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
    problems = []
    constants = hash_constants(config)
    for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        total = int(constants[layer].primes.sum())
        if total != rows:
            problems.append(f"layer {layer}: engram_num_embeddings = {rows}, its primes sum up to {total}")
        products = [int(value) * (config.engram_compressed_vocab_size - 1) for value in constants[layer].multipliers]
        if any(value % 2 == 0 for value in constants[layer].multipliers.tolist()) or max(products) >= 2**63:
            problems.append(f"layer {layer}: a hash multiplier is even or overflows")
    path = checkpoint.directory / "tokenizer.json"
    if not path.is_file():
        problems.append("tokenizer.json is missing; copy it from the source")
    else:
        size = int(token_map(Tokenizer.from_file(str(path))).max()) + 1
        if size != config.engram_compressed_vocab_size:
            problems.append(
                f"engram_compressed_vocab_size = {config.engram_compressed_vocab_size}, the tokenizer has {size} "
                "distinct normalised tokens; use the tokenizer of this checkpoint"
            )
    layers = ", ".join(map(str, config.engram_layer_ids))
    report.add("constants", problems, f"primes, multipliers and compressed vocabulary of layers {layers} recomputed")
