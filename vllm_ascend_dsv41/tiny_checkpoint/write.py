"""Writing a tiny checkpoint to disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from .configs import flat_config, hf_config, tokenizer_config
from .sizes import Sizes
from .tensors import Builder
from .tokenizer import build_tokenizer, compressed_vocab_size


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------------------------
# Command line
# --------------------------------------------------------------------------------------------------


def write_checkpoint(sizes: Sizes, out: Path | None) -> int:
    """Write the checkpoint (or, without ``out``, print its tensors); returns the tensor bytes."""
    sizes.validate()
    builder = Builder(sizes, dry_run=out is None)
    total, weight_map = 0, {}
    makers = list(builder.shards())
    for number, make in enumerate(makers, 1):
        file = f"model-{number:05d}-of-{len(makers):05d}.safetensors"
        tensors = make()
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        total += size
        weight_map.update(dict.fromkeys(tensors, file))
        if out is None:
            print(f"{file}  {len(tensors):5d} tensors  {size / 2**20:10.2f} MiB")
        else:
            out.mkdir(parents=True, exist_ok=True)
            save_file(tensors, out / file, metadata={"format": "pt"})
    print(f"{len(weight_map)} tensors, {total / 2**20:.2f} MiB in {len(makers)} shards")
    if out is None:
        return total

    write_sidecars(sizes, out)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / "model.safetensors.index.json", index)
    return total


def write_sidecars(sizes: Sizes, out: Path, phrases: Sequence[str] = (), text: str = "") -> dict[str, Any]:
    """Tokenizer and configs, see ``build_tokenizer``. Returns the contents of config.json."""
    tokenizer = build_tokenizer(sizes.vocab_size, phrases, text)
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", tokenizer_config(sizes.max_position_embeddings))

    def token_id(token: str) -> int:
        found = tokenizer.token_to_id(token)
        if found is None:
            raise RuntimeError(f"the tokenizer lacks {token}")
        return found

    config = hf_config(sizes, token_id, compressed_vocab_size(tokenizer))
    write_json(out / "config.json", config)
    write_json(out / "inference" / "config.json", flat_config(config))
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": config["eos_token_id"],
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 0.95,
            "transformers_version": config["transformers_version"],
        },
    )
    return config
