"""``vllm bench serve``, by its functions: the command itself asks for the version of a distribution named vllm, which
vLLM's wheel for CPUs is not."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    """Arguments as those of ``vllm bench serve``."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench

    parser = argparse.ArgumentParser(prog="vllm bench serve")
    add_cli_args(parser)
    bench(parser.parse_args())
    return 0


if __name__ == "__main__":
    sys.exit(main())
