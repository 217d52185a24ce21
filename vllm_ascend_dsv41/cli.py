"""The ``dsv41`` command."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType


def _size(text: str) -> int:
    """Bytes from ``4GiB``, ``512MiB`` or a plain number."""
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    unit = next((u for u in units if text.endswith(u)), "")
    try:
        value = int(float(text.removesuffix(unit)) * units.get(unit, 1))
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 4GiB")
    return value


def _quantize(args: argparse.Namespace) -> int:
    from .quant import Weights, convert

    target = convert(args.source, args.target, Weights(args.weights), args.shard_size)
    print(f"{target}: {args.weights} conversion of {args.source}, complete")
    return 0


def _demo(args: argparse.Namespace) -> int:
    from .deploy.demo import demo

    return demo(args.directory, args.port)


def _selftest(args: argparse.Namespace) -> int:
    from .deploy.selftest import selftest

    return selftest(args.device, args.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsv41", description="Serve DeepSeek-V4.1-Flash with vLLM, and its tools.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    quantize = commands.add_parser("quantize", help="convert the official checkpoint to the Ascend layout")
    quantize.add_argument("source", type=Path, metavar="SRC", help="directory of the official checkpoint")
    quantize.add_argument("target", type=Path, metavar="DST", help="directory to create")
    quantize.add_argument(
        "--weights",
        choices=["w8a8", "bf16"],
        default="w8a8",
        help="w8a8: INT8 linears, experts and Engram tables; bf16: everything in BF16 (default: %(default)s)",
    )
    quantize.add_argument(
        "--shard-size", type=_size, default="4GiB", metavar="SIZE", help="largest weight file (default: %(default)s)"
    )
    quantize.set_defaults(run=_quantize)

    serve = commands.add_parser(
        "serve",
        help="vllm serve with this plugin; every option is passed on",
        add_help=False,
        usage="dsv41 serve MODEL [option of vllm serve ...]",
    )
    serve.set_defaults(run=None)

    demo = commands.add_parser("demo", help="tiny checkpoint, conversion, server, requests, comparison: in minutes")
    demo.add_argument("--directory", type=Path, help="keep checkpoints and server log here (default: a temporary one)")
    demo.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    demo.set_defaults(run=_demo)

    selftest = commands.add_parser("selftest", help="compare every operator implementation with its reference")
    selftest.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    selftest.add_argument("--seed", type=int, default=0)
    selftest.set_defaults(run=_selftest)
    return parser


def _terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM and SIGHUP end a command like Ctrl-C: partial output and started servers are cleared away."""
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; expected errors are one message on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["serve"]:  # argparse must not interpret vLLM's options
            from .deploy.serve import serve

            return serve(arguments[1:])
        args = _parser().parse_args(arguments)
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(name) is not signal.SIG_IGN:  # as nohup asks
                    signal.signal(name, _terminate)
        return int(args.run(args))
    except (ValueError, OSError) as error:
        print(f"dsv41: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dsv41: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
