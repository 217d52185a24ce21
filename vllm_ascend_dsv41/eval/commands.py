"""``dsv41 eval``: its options. Exit status: 0 ok, 1 degraded (compare: not comparable), 2 usage, 3 invalid."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..deploy.commands import count, positive
from .errors import EvalError

USAGE, LOST = 2, 3
COMMON = (
    *("url", "model", "timeout", "effort", "temperature", "top_p", "seed", "max_tokens"),
    *("output", "checkpoint", "startup_report", "image_digest"),
)


def add(commands: Any) -> None:
    """The subcommand and its own subcommands."""
    evaluate = commands.add_parser("eval", help="accuracy and speed of a running service, with all that a number needs")
    kinds = evaluate.add_subparsers(dest="kind", required=True, metavar="KIND")

    setup = kinds.add_parser("setup", help="install AISBench in an environment of its own: 1.4 GB, some minutes")
    setup.set_defaults(run=_setup)

    accuracy = kinds.add_parser("accuracy", help="AISBench over a data set: score, verdict, manifest")
    accuracy.add_argument(
        "--dataset",
        required=True,
        metavar="NAME",
        help="gsm8k, gpqa, aime2025, ceval, mmlu_pro, livecodebench, or a file of lines {question, answer}: NAME.jsonl",
    )
    accuracy.add_argument(
        "--data", type=Path, metavar="DIR", help="where ais_bench/datasets lies (or: AIS_BENCH_DATASETS_CACHE)"
    )
    accuracy.add_argument("--dataset-sha256", metavar="HEX", help="that the data set's first file must have")
    accuracy.add_argument("--limit", type=count, metavar="N", help="the first N questions (of each part) only")
    accuracy.add_argument("--concurrency", type=count, default=32, metavar="N", help="(default: %(default)d)")
    accuracy.add_argument(
        "--most-unusable",
        type=_share,
        default=0.02,
        metavar="SHARE",
        help="of answers that are cut, empty or still in thought, before a run is invalid (default: %(default)g)",
    )
    _common(accuracy, temperature=1.0)
    accuracy.set_defaults(run=_accuracy)

    perf = kinds.add_parser("perf", help="AISBench and vllm bench serve with real text: table, CSV, plot, manifest")
    perf.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="to make prompts of; lines {prompt} where it ends in .jsonl (default: this package's sources)",
    )
    perf.add_argument("--tools", type=_tools, default=("aisbench", "vllm"), metavar="NAME,NAME", help="(default: both)")
    perf.add_argument(
        "--concurrency", type=_counts, default=(1, 2, 4, 8, 16), metavar="N,N,...", help="(default: 1,2,4,8,16)"
    )
    perf.add_argument("--requests", type=count, default=16, metavar="N", help="of a level (default: %(default)d)")
    perf.add_argument("--prompt-words", type=count, default=400, metavar="N", help="(default: %(default)d)")
    perf.add_argument("--ignore-eos", action="store_true", help="every answer as long as --max-tokens, default 256")
    _common(perf, temperature=0.0)
    perf.set_defaults(run=_perf)

    compare = kinds.add_parser("compare", help="whether two runs may be compared, and what their difference is worth")
    compare.add_argument("runs", type=Path, nargs=2, metavar="RUN", help="folder of a run, or its manifest.json")
    compare.add_argument("--json", action="store_true", help="as JSON on standard output")
    compare.set_defaults(run=_compare)


def _common(parser: argparse.ArgumentParser, temperature: float) -> None:
    parser.add_argument("--url", required=True, help="of the service, for example http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="ID", help="served name (default: the first that /v1/models lists)")
    parser.add_argument("--effort", type=_effort, default=50, metavar="N|off", help="1 to 100 (default: %(default)d)")
    parser.add_argument("--temperature", type=_number, default=temperature, metavar="T", help="(default: %(default)g)")
    parser.add_argument("--top-p", type=_share, default=0.95, metavar="P", help="(default: %(default)g)")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="(default: %(default)d)")
    parser.add_argument(
        "--max-tokens", type=count, metavar="N", help="of an answer (default: what the server's context leaves)"
    )
    parser.add_argument(
        "--timeout", type=positive, default=7200.0, metavar="S", help="of a request (default: %(default)g)"
    )
    parser.add_argument("--output", type=Path, default=Path("eval-runs"), metavar="DIR", help="(default: %(default)s)")
    record = parser.add_argument_group("for the manifest")
    record.add_argument("--checkpoint", type=Path, metavar="CKPT", help="(default: what the service names, if here)")
    record.add_argument("--startup-report", type=Path, metavar="FILE", help="of dsv41 serve --startup-report")
    record.add_argument("--image-digest", metavar="SHA256", help="of the server's container image")


def _effort(text: str) -> int | None:
    if text == "off":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 1 to 100, or off")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 to 2")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 to 1")
    return value


def _counts(text: str) -> tuple[int, ...]:
    found = tuple(count(part) for part in text.split(","))
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: each once")
    return found


def _tools(text: str) -> tuple[str, ...]:
    from .perf import TOOLS

    names = tuple(text.split(","))
    if not set(names) <= set(TOOLS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {' or '.join(TOOLS)}, or both with a comma")
    return names


def _options(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in COMMON}
    return {**given, "key": os.environ.get("DSV41_API_KEY", ""), "command": tuple(sys.argv)}


def _refused(error: Exception) -> int:
    print(f"dsv41: error: {error}", file=sys.stderr)
    return USAGE


def _lost(error: Exception) -> int:
    """Not the status of a run that is degraded."""
    print(f"dsv41: error: the run has no manifest: {error}", file=sys.stderr)
    return LOST


def _setup(args: argparse.Namespace) -> int:
    from . import aisbench

    try:
        made = aisbench.setup()
    except EvalError as error:
        print(f"dsv41: error: {error}", file=sys.stderr)
        return 1
    print(f"AISBench {made.version}: {made.root}")
    return 0


def _accuracy(args: argparse.Namespace) -> int:
    from ..deploy.check import AddressError
    from .accuracy import AccuracyOptions, accuracy

    try:
        options = AccuracyOptions(
            **_options(args),
            dataset=args.dataset,
            data=args.data,
            digest=args.dataset_sha256,
            limit=args.limit,
            concurrency=args.concurrency,
            most_unusable=args.most_unusable,
        )
        return accuracy(options).verdict.status
    except (EvalError, AddressError) as error:
        return _refused(error)
    except (ValueError, OSError) as error:
        return _lost(error)


def _perf(args: argparse.Namespace) -> int:
    from ..deploy.check import AddressError
    from .perf import PerfOptions, perf

    try:
        options = PerfOptions(
            **_options(args),
            texts=tuple(args.text),
            tools=args.tools,
            concurrency=args.concurrency,
            requests=args.requests,
            prompt_words=args.prompt_words,
            ignore_eos=args.ignore_eos,
        )
        return perf(options).verdict.status
    except (EvalError, AddressError) as error:
        return _refused(error)
    except (ValueError, OSError) as error:
        return _lost(error)


def _compare(args: argparse.Namespace) -> int:
    from .compare import compare, text

    try:
        found = compare(*args.runs)
    except EvalError as error:
        return _refused(error)
    print(json.dumps(found.as_json(), indent=1) if args.json else text(found))
    return 1 if found.against else 0
