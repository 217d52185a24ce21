"""Command line of the generator: one option per size."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from .sizes import PRESETS, Sizes
from .write import write_checkpoint


def parse_args(argv: list[str] | None = None) -> tuple[Sizes, Path | None]:
    parser = argparse.ArgumentParser(
        description="Write a tiny random DeepSeek-V4.1 checkpoint in the official layout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="a", help="starting point for all sizes")
    parser.add_argument("--out", type=Path, help="directory to write")
    parser.add_argument("--dry-run", action="store_true", help="print shard sizes only")

    def int_list(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    defaults = Sizes()
    for item in dataclasses.fields(Sizes):
        value = getattr(defaults, item.name)
        option = "--" + item.name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=argparse.SUPPRESS)
        elif isinstance(value, list):
            parser.add_argument(option, type=int_list, metavar="N,N", help=f"preset a: {','.join(map(str, value))}")
        else:
            parser.add_argument(option, type=type(value), metavar="N", help=f"preset a: {value}")
    args = parser.parse_args(argv)
    if (args.out is None) != args.dry_run:
        parser.error("give either --out or --dry-run")
    chosen = dict(PRESETS[args.preset])
    names = [item.name for item in dataclasses.fields(Sizes)]
    chosen.update({name: getattr(args, name) for name in names if getattr(args, name) is not None})
    return Sizes(**chosen), args.out


def main() -> None:
    sizes, out = parse_args()
    try:
        write_checkpoint(sizes, out)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
