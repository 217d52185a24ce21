"""All checks, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...launch import LaunchError
from ..host import Host
from ..report import Result, bad, skip
from ..target import Target
from . import checkpoint, command, devices, memory, network, software

Check = Callable[[Host, Target], Result]
#: Name -> check. Each looks at one thing and gives one line.
CHECKS: dict[str, Check] = {
    **command.CHECKS,
    **network.CHECKS,
    **devices.CHECKS,
    **memory.CHECKS,
    **software.CHECKS,
    **checkpoint.CHECKS,
}
#: Checks of a command, or of what only a recipe says.
NEED_RECIPE = {*command.CHECKS, *network.CHECKS, "memory-plan", "host-memory", "packages", "checkpoint", "superpod"}


def run(host: Host, target: Target) -> list[Result]:
    """Every check, several at a time: tools of the driver take up to a second each."""

    def one(item: tuple[str, Check]) -> Result:
        name, check = item
        try:
            return check(host, target)
        except LaunchError as error:
            return bad(name, str(error), "an option that can be read", "correct the command line")
        except Exception as error:  # one odd answer must not hide all other lines
            found = f"this check failed itself: {type(error).__name__}: {error}"
            return bad(name, found, "an answer that it can read", "look at it by hand, and report this")

    chosen = CHECKS
    if target.recipe is None:
        chosen = {name: check for name, check in CHECKS.items() if name not in NEED_RECIPE}
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, chosen.items()))
    if target.recipe is None:
        results.insert(
            0, skip("recipe", "none named: command, ports, memory plan, packages and checkpoint not looked at")
        )
    return results
