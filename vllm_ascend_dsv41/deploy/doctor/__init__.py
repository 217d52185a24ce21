"""``dsv41 doctor``: what would end a start, found in seconds instead of after half an hour."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from ..launch import LaunchError, Node
from ..recipe import Recipe
from . import peers
from .checks import run
from .checks.devices import nodes_of
from .checks.software import image_there
from .compare import SCHEMA, compare, facts, read_reports
from .host import Host, Machine
from .lint import lint
from .report import Result, Status, failed, text
from .target import Target, target_of

__all__ = [
    "Host",
    "Machine",
    "Result",
    "Target",
    "compare",
    "doctor",
    "examine",
    "lint",
    "print_results",
    "read_reports",
]


def examine(host: Host, target: Target) -> list[Result]:
    """All checks of this node."""
    return run(host, target)


def doctor(
    recipe: Recipe | None,
    node: Node,
    model: str,
    given: Sequence[str] | None,
    as_json: bool,
    meet: bool,
    wait: float,
    image: str | None = None,
) -> int:
    """Check this node, and with ``meet`` the others; print lines, or JSON. Returns 1 when something must be changed.

    Without a recipe only the machine is looked at. Raises LaunchError, RecipeError.
    """
    host = Machine()
    if recipe is not None:
        target = target_of(recipe, node, model, given, host.environment)
    elif given is not None or meet:
        raise LaunchError("doctor: a command and --peers need a RECIPE; `dsv41 plan --list` shows them")
    else:
        target = Target(None, node, {}, host.environment, model, npu=bool(nodes_of(host)))
    name = f"{node.rank}" + (f" ({node.local_ip})" if node.local_ip else "")
    results = examine(host, target)
    if image is not None:
        results.append(image_there(host, image))
    if meet and not as_json:
        print(text(results, name), flush=True)  # others may let us wait
    own = len(results)
    if meet:

        def say(line: str) -> None:
            print(f"dsv41 doctor: {line}", file=sys.stderr, flush=True)

        results += peers.meet(host, target, [r.check for r in results if r.status is Status.FAIL], wait, say)
    if as_json:
        print(json.dumps(_report(results, name, target, host), indent=1))
    else:
        print(text(results[own:], "") if meet else text(results, name))
    return int(failed(results))


def _report(results: Sequence[Result], node: str, target: Target, host: Host) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "node": node,
        "recipe": target.recipe.name if target.recipe else None,
        "failed": failed(results),
        "results": [result.as_json() for result in results],
        "fingerprint": facts(host, target),
    }


def print_results(results: Sequence[Result], as_json: bool, title: str = "") -> int:
    """Of ``compare`` and ``--lint-command``. Returns the exit status."""
    if as_json:
        print(
            json.dumps(
                {"schema": SCHEMA, "failed": failed(results), "results": [r.as_json() for r in results]}, indent=1
            )
        )
    else:
        print(text(results, title))
    return int(failed(results))
