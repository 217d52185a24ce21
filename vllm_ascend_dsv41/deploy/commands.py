"""``dsv41 plan``, ``dsv41 doctor`` and ``dsv41 check``: their options."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import recipe as recipes
from .launch import LaunchError, Node, table


def add(commands: Any) -> None:
    """The subcommands."""
    plan = commands.add_parser("plan", help="memory of a launch: per rank, per node, what limits it, what fits")
    plan.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a recipe, or a file NAME.yaml")
    plan.add_argument("--list", action="store_true", help="the recipes that there are")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    plan.add_argument(
        "--model", type=Path, metavar="CKPT", help="a checkpoint's own sizes (default: the released ones)"
    )
    plan.add_argument("--plot", type=Path, metavar="FILE", help="a bar chart: plan.png, .svg or .pdf")
    plan.add_argument("--json", action="store_true", help="the plan as JSON on standard output")
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser(
        "doctor",
        help="what would end a start, found in seconds",
        usage="dsv41 doctor [RECIPE] [option ...] [-- COMMAND]\n       dsv41 doctor compare A.json B.json ...\n"
        "       dsv41 doctor --lint-command FILE",
    )
    doctor.add_argument("what", nargs="*", metavar="RECIPE", help="a recipe; or: compare A.json B.json ...")
    doctor.add_argument("--node-rank", default=os.environ.get("NODE_RANK", "0"), metavar="N", help="this server")
    doctor.add_argument("--node0-ip", default=os.environ.get("NODE0_IP", ""), metavar="IP")
    doctor.add_argument("--local-ip", default=os.environ.get("LOCAL_IP", ""), metavar="IP")
    doctor.add_argument("--nic", default=os.environ.get("NIC_NAME", ""), metavar="NAME")
    doctor.add_argument("--model", default=os.environ.get("MODEL_PATH", ""), metavar="CKPT")
    doctor.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of the recipe")
    doctor.add_argument("--peers", action="store_true", help="meet the other nodes: ports both ways, what differs")
    doctor.add_argument(
        "--wait", type=float, default=600, metavar="S", help="for the other nodes (default: %(default)g)"
    )
    doctor.add_argument("--image", metavar="NAME", help="also ask the registry whether this image is there (docker)")
    doctor.add_argument(
        "--lint-command", metavar="FILE", help="check a launch script for all its nodes, without the machine"
    )
    doctor.add_argument("--json", action="store_true", help="results and fingerprint as JSON on standard output")
    doctor.set_defaults(run=_doctor, given=None)

    check = commands.add_parser("check", help="a running service, asked as its clients would: meaning, not only status")
    check.add_argument("url", metavar="URL", help="of the service, for example http://127.0.0.1:8000")
    check.add_argument("--model", metavar="ID", help="served name (default: the first that /v1/models lists)")
    check.add_argument(
        "--timeout", type=positive, default=300.0, metavar="S", help="of a request (default: %(default)g)"
    )
    check.add_argument(
        "--long-prompt", type=count, default=6000, metavar="WORDS", help="of the long prompt (default: %(default)d)"
    )
    check.add_argument(
        "--concurrency", type=count, default=8, metavar="N", help="requests at once (default: %(default)d)"
    )
    check.add_argument("--json", action="store_true", help="the results as JSON on standard output")
    check.set_defaults(run=_check)


def positive(text: str) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def count(text: str) -> int:
    """A positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """``doctor ... -- COMMAND``: what is before, and the command."""
    words = list(arguments)
    if words[:1] == ["doctor"] and "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return words, None


def _plan(args: argparse.Namespace) -> int:
    from .plan import chart, plan, text

    if args.list or args.recipe is None:
        rows = [(name, r.shape, r.hardware, r.title["en"]) for name in recipes.names() for r in [recipes.load(name)]]
        print(table(rows))
        return 0 if args.list else 2
    found = plan(recipes.load(args.recipe, args.set), args.model)
    if args.plot is not None:
        chart(found, args.plot)
    print(json.dumps(found.as_json(), indent=1) if args.json else text(found))
    return 0 if found.fits else 1


def _doctor(args: argparse.Namespace) -> int:
    from . import doctor

    if args.lint_command:
        if args.what or args.given is not None:
            raise LaunchError("doctor --lint-command FILE: takes no recipe and no command beside it")
        return doctor.print_results(doctor.lint(args.lint_command), args.json, args.lint_command)
    if args.what[:1] == ["compare"]:
        return doctor.print_results(doctor.compare(doctor.read_reports(args.what[1:])), args.json)
    if len(args.what) > 1:
        raise LaunchError(f"doctor {' '.join(args.what)}: one recipe, or compare A.json B.json")
    if not args.node_rank.isdecimal():
        raise LaunchError(f"node rank {args.node_rank!r}: expected 0, 1, ...")
    settings = [*recipes.from_environment(os.environ), *args.set]
    recipe = recipes.load(args.what[0], settings) if args.what else None
    node = Node(int(args.node_rank), args.node0_ip, args.local_ip, args.nic)
    return doctor.doctor(recipe, node, args.model, args.given, args.json, args.peers, args.wait, args.image)


def _check(args: argparse.Namespace) -> int:
    from .check import Options, check

    key = os.environ.get("DSV41_API_KEY", "")
    options = Options(args.model, key, args.timeout, args.long_prompt, args.concurrency)
    return check(args.url, options, args.json)
