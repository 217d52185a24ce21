"""The ``dsv41`` command."""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from .deploy.commands import add as add_commands
from .deploy.commands import count, split
from .eval.commands import add as add_eval


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


def _sample(text: str) -> int | None:
    """A positive number, or ``all``."""
    return None if text == "all" else count(text)


def _quantize(args: argparse.Namespace) -> int:
    from .quant import CheckpointError, Weights, convert
    from .quant.dry_run import dry_run, print_report
    from .quant.partial import partial_path
    from .quant.progress import Events, say

    weights, options = Weights(args.weights), {"rotate": args.rotate == "quarot", "workers": args.workers}
    if not args.dry_run:
        progress = Events() if args.json else None
        try:
            target = convert(args.source, args.target, weights, args.shard_size, progress=progress, **options)
        except KeyboardInterrupt:
            if (partial := partial_path(args.target)).exists():
                print(f"dsv41: {partial} keeps what is done: the same command goes on", file=sys.stderr)
            raise
        text = f"{target}: {args.weights} conversion of {args.source}, complete"
        say(json.dumps({"event": "complete", "target": str(target)}) if args.json else text)
        return 0
    report = dry_run(args.source, args.target, weights, args.shard_size, **options)
    if args.json:
        print(json.dumps(report))
    else:
        print_report(report, args.list)
    free, needed = report["room"]["free"], report["room"]["needed"]
    if free is None:
        raise CheckpointError(f"{args.target.absolute().parent}: no such directory; create it first")
    if free < needed:
        raise CheckpointError(f"{args.target}: {free >> 20} MiB free, the conversion needs {needed >> 20} MiB")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from .verify import manifest, verify

    quiet = args.json or not sys.stderr.isatty()
    if args.write_manifest is not None:
        manifest.refuse_existing(args.write_manifest)
    report = verify(args.checkpoint, args.against, args.sample, check_manifest=args.check_manifest, quiet=quiet)
    if args.write_manifest is not None and report.holds:
        count = manifest.write(args.checkpoint, args.write_manifest, quiet)
        report.add("manifest", [], f"{args.write_manifest}: {count} files")
    elif args.write_manifest is not None:
        report.skip("manifest", "not written: the checkpoint is not as it must be")
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        report.print()
    return 0 if report.holds else 1


def _demo(args: argparse.Namespace) -> int:
    from .deploy.demo import demo

    return demo(args.directory, args.port)


def _selftest(args: argparse.Namespace) -> int:
    from .deploy.selftest import selftest

    only = [name for name in args.ops.split(",") if name] if args.ops else ()
    return selftest(args.device, args.seed, only, args.json, args.quick, args.ranks or 0)


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
    quantize.add_argument(
        "--rotate",
        choices=["none", "quarot"],
        default="none",
        help="quarot: turn the streams by a block-32 Hadamard matrix, which spreads outliers (default: %(default)s)",
    )
    quantize.add_argument("--workers", type=count, metavar="N", help="processes (default: one per usable core)")
    quantize.add_argument(
        "--dry-run", action="store_true", help="print what would be written, and about how long it takes"
    )
    quantize.add_argument("--list", action="store_true", help="with --dry-run: every tensor, with its label")
    quantize.add_argument("--json", action="store_true", help="events, or the plan, as JSON on standard output")
    quantize.set_defaults(run=_quantize)

    verify = commands.add_parser("verify", help="check a checkpoint: structure, constants, numbers, rotation, config")
    verify.add_argument("checkpoint", type=Path, metavar="CKPT", help="directory of either layout")
    verify.add_argument("--against", type=Path, metavar="SRC", help="official checkpoint that it was converted from")
    verify.add_argument(
        "--sample",
        type=_sample,
        default=2,
        metavar="N",
        help="blocks of 32 rows compared per tensor, or all (default: 2)",
    )
    verify.add_argument("--write-manifest", type=Path, metavar="FILE", help="write the SHA-256 of every file")
    verify.add_argument("--check-manifest", type=Path, metavar="FILE", help="compare every file with such a manifest")
    verify.add_argument("--json", action="store_true", help="the whole report as JSON on standard output")
    verify.set_defaults(run=_verify)

    serve = commands.add_parser(
        "serve",
        help="vllm serve with this plugin, from a recipe or with options of one's own",
        add_help=False,
        usage="dsv41 serve MODEL [option of vllm serve ...]",
    )
    serve.set_defaults(run=None)

    add_commands(commands)
    add_eval(commands)

    demo = commands.add_parser("demo", help="tiny checkpoint, conversion, server, requests, comparison: in minutes")
    demo.add_argument("--directory", type=Path, help="keep checkpoints and server log here (default: a temporary one)")
    demo.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    demo.set_defaults(run=_demo)

    selftest = commands.add_parser("selftest", help="try this machine: operators, device, collectives, a tiny model")
    selftest.add_argument(
        "--device",
        default="cpu",
        help="of the operators; collectives take all of its kind, the model the first (default: %(default)s)",
    )
    selftest.add_argument("--seed", type=int, default=0)
    selftest.add_argument("--ops", metavar="NAME,NAME", help="these operators only (default: all, and the device)")
    selftest.add_argument("--quick", action="store_true", help="without collectives and the tiny model: seconds")
    selftest.add_argument("--ranks", type=count, metavar="N", help="of the collectives (default: one per device)")
    selftest.add_argument("--json", action="store_true", help="the results as JSON on standard output")
    selftest.set_defaults(run=_selftest)
    return parser


def _terminate(signum: int, frame: FrameType | None) -> None:
    """SIGTERM and SIGHUP end a command like Ctrl-C: partial output and started servers are cleared away."""
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; expected errors are one message on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may be anything
    try:
        if arguments[:1] == ["serve"]:  # argparse must not interpret vLLM's options
            from .deploy.serve import serve

            return serve(arguments[1:])
        arguments, given = split(arguments)
        args = _parser().parse_args(arguments)
        if given is not None:
            args.given = given
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
