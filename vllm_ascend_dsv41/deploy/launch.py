"""From a recipe and a node to the command and the environment of ``dsv41 serve``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .recipe import Recipe, Value

PLACEHOLDER = re.compile(r"<[A-Za-z0-9_ -]+>")
#: What the guide's authors preload: allocation from many threads. Debian and Ubuntu, openEuler.
JEMALLOC = (
    "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2",
    "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2",
    "/usr/lib64/libjemalloc.so.2",
)
#: vLLM's short options (``vllm.engine.arg_utils``).
SHORT = {
    "-ac": "attention-config",
    "-cc": "compilation-config",
    "-dp": "data-parallel-size",
    "-dpa": "data-parallel-address",
    "-dpb": "data-parallel-backend",
    "-dpe": "data-parallel-external-lb",
    "-dph": "data-parallel-hybrid-lb",
    "-dpl": "data-parallel-size-local",
    "-dpn": "data-parallel-rank",
    "-dpp": "data-parallel-rpc-port",
    "-dpr": "data-parallel-start-rank",
    "-ep": "enable-expert-parallel",
    "-pp": "pipeline-parallel-size",
    "-q": "quantization",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}
#: Options that differ between nodes of one deployment: everything else must be the same.
OF_THE_NODE = ("headless", "data-parallel-start-rank", "host", "port")
ENVIRONMENT_OF_THE_NODE = ("HCCL_IF_IP", "VLLM_HOST_IP", "VLLM_CPU_OMP_THREADS_BIND", "DSV41_STARTUP_REPORT")


class LaunchError(ValueError):
    """A node that cannot be launched as told, with what to give instead."""


@dataclass(frozen=True)
class Node:
    """Which server of a deployment, and how the others reach it."""

    rank: int = 0
    node0_ip: str = ""
    local_ip: str = ""
    nic: str = ""


@dataclass(frozen=True)
class Item:
    """One option or variable: ``origin`` says where its value comes from."""

    name: str
    value: Value
    origin: str

    @property
    def words(self) -> list[str]:
        """As words of a command line."""
        if isinstance(self.value, bool):
            return [f"--{self.name}" if self.value else f"--no-{self.name}"]
        return [f"--{self.name}", text_of(self.value)]


@dataclass(frozen=True)
class Launch:
    """One server's command and environment."""

    model: str
    flags: tuple[Item, ...]
    environment: tuple[Item, ...]

    @property
    def arguments(self) -> list[str]:
        """Of ``dsv41 serve``."""
        return [self.model, *(word for item in self.flags for word in item.words)]

    @property
    def variables(self) -> dict[str, str]:
        """To be added to the environment."""
        return {item.name: text_of(item.value) for item in self.environment}


def text_of(value: Value) -> str:
    """A value as a command line or an environment has it."""
    if isinstance(value, (dict, list)):
        return json.dumps(value, separators=(",", ":"))
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value)


def command(recipe: Recipe, node: Node, model: str, check: bool = True) -> Launch:
    """What node ``node.rank`` runs. Raises LaunchError: placeholders, missing addresses, a rank that there is not;
    not when it is only to be looked at (``check`` False)."""
    if check:
        _check(recipe, node, model)
    return Launch(model, tuple(_flags(recipe, node)), tuple(_environment(recipe, node)))


def _check(recipe: Recipe, node: Node, model: str) -> None:
    nodes = recipe.topology.number("nodes")
    if not 0 <= node.rank < nodes:
        raise LaunchError(f"node rank {node.rank}: recipe {recipe.name} has nodes 0 to {nodes - 1}")
    given = {"model": model}
    if nodes > 1:
        given |= {"NODE0_IP": node.node0_ip, "LOCAL_IP": node.local_ip, "NIC_NAME": node.nic}
    wrong = [f"{name} is {value!r}" for name, value in given.items() if not value or PLACEHOLDER.search(value)]
    if wrong:
        raise LaunchError(f"{', '.join(wrong)}: fill in this server's values; nothing was started")
    if nodes > 1 and (node.rank == 0) != (node.node0_ip == node.local_ip):
        raise LaunchError(
            f"node rank {node.rank}: NODE0_IP {node.node0_ip} and LOCAL_IP {node.local_ip} must be "
            f"{'equal on node 0' if node.rank == 0 else 'different on all other nodes'}"
        )


def _flags(recipe: Recipe, node: Node) -> list[Item]:
    place = recipe.topology
    across, local, nodes = (place.number(n) for n in ("data_parallel_size", "data_parallel_size_local", "nodes"))
    ways = [Item(name, recipe.flags[name].value, origin(recipe, name)) for name in ("host", "port")]
    if node.rank:
        ways.append(Item("headless", True, "node"))
        ways.append(Item("data-parallel-start-rank", node.rank * local, "node: rank x data_parallel_size_local"))
    if nodes > 1:
        ways.append(Item("data-parallel-address", node.node0_ip, "node: NODE0_IP"))
        ways.append(
            Item(
                "data-parallel-rpc-port",
                recipe.flag("data-parallel-rpc-port"),
                origin(recipe, "data-parallel-rpc-port"),
            )
        )
    if across > 1:
        for name in ("data_parallel_size", "data_parallel_size_local"):
            ways.append(Item(name.replace("_", "-"), place.number(name), origin(recipe, name)))
    ways.append(
        Item("tensor-parallel-size", place.number("tensor_parallel_size"), origin(recipe, "tensor_parallel_size"))
    )
    if place.expert_parallel.value:
        ways.append(Item("enable-expert-parallel", True, origin(recipe, "expert_parallel")))
    done = {"host", "port", "data-parallel-rpc-port"}
    return ways + [
        Item(name, item.value, origin(recipe, name)) for name, item in recipe.flags.items() if name not in done
    ]


def _environment(recipe: Recipe, node: Node) -> list[Item]:
    items = [Item(name, item.value, origin(recipe, name)) for name, item in recipe.environment.items()]
    if recipe.topology.number("nodes") > 1:
        items.append(Item("VLLM_HOST_IP", node.local_ip, "node: LOCAL_IP"))
        items.append(Item("GLOO_SOCKET_IFNAME", node.nic, "node: NIC_NAME"))
        items.append(Item("TP_SOCKET_IFNAME", node.nic, "node: NIC_NAME"))
        if recipe.device == "npu":
            items.append(Item("HCCL_IF_IP", node.local_ip, "node: LOCAL_IP"))
            items.append(Item("HCCL_SOCKET_IFNAME", node.nic, "node: NIC_NAME"))
    if recipe.device == "npu":
        devices = ",".join(str(n) for n in range(recipe.topology.number("devices_per_node")))
        items.append(Item("ASCEND_RT_VISIBLE_DEVICES", devices, origin(recipe, "devices_per_node")))
    return items


def origin(recipe: Recipe, name: str) -> str:
    """Where a value of the recipe comes from: a key of its ``sources``, or ``--set``."""
    return next(item.source for known, item in recipe.items() if known == name)


def jemalloc(root: Path = Path("/")) -> str | None:
    """The library to preload, where it is installed."""
    return next((path for path in JEMALLOC if (root / path.lstrip("/")).is_file()), None)


def explain(recipe: Recipe, launch: Launch) -> str:
    """A table: every option and variable, its value, and where it comes from; below it the sources in words."""
    rows = [(f"--{item.name}", "" if item.value is True else text_of(item.value), item.origin) for item in launch.flags]
    rows += [(item.name, text_of(item.value), item.origin) for item in launch.environment]
    lines = [table([("MODEL", launch.model, "given"), *rows]), "", f"recipe {recipe.name}, sources:"]
    lines += [f"  {name}: {text}" for name, text in recipe.sources.items()]
    if recipe.left_out:
        lines += ["left out:", *(f"  --{name}: {' '.join(why.split())}" for name, why in recipe.left_out.items())]
    return "\n".join(lines)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    cells = ["  ".join([*(c.ljust(w) for c, w in zip(row[:-1], widths, strict=True)), row[-1]]) for row in rows]
    return "\n".join(line.rstrip() for line in cells)


def parse_options(arguments: Sequence[str]) -> dict[str, Any]:
    """Options of a ``vllm serve`` command line by name without dashes: values as text, True for bare ones, the last
    one of a name counts. Both spellings of names (``max_num_seqs``) and of values (``--name=value``, ``--no-name``)
    are read; the model is under ``model``. ``--name.key value`` makes an object
    of such keys alone, which wins over ``--name '{...}'``, as in vLLM."""
    options: dict[str, Any] = {}
    dotted: dict[str, dict[str, Any]] = {}
    words, at = list(arguments), 0
    while at < len(words):
        word = words[at]
        at += 1
        short, equals, value = word.partition("=")
        if short in SHORT:
            word = f"--{SHORT[short]}{equals}{value}"
        if not word.startswith("--"):
            options.setdefault("model", word)
            continue
        name, equals, value = word[2:].partition("=")
        name, _, key = name.partition(".")
        name = name.replace("_", "-")
        found: Any = value
        if not equals:
            found = True
            if at < len(words) and (not words[at].startswith("-") or _is_number(words[at])):
                found = words[at]
                at += 1
        if key:
            _put(dotted.setdefault(name, {}), key.split("."), found)
        elif name.startswith("no-") and found is True:
            options[name.removeprefix("no-")] = False
        else:
            options[name] = found
    return options | {name: json.dumps(value) for name, value in dotted.items()}


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def _put(whole: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Into an object of objects; what is in the way is replaced."""
    for key in keys[:-1]:
        inner = whole.get(key)
        whole[key] = inner if isinstance(inner, dict) else {}
        whole = whole[key]
    try:
        whole[keys[-1]] = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        whole[keys[-1]] = value


def json_option(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An option that is a JSON object; empty where it is not given. Raises LaunchError where it is no object."""
    text = options.get(name)
    if text is None:
        return {}
    try:
        value = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError as error:
        raise LaunchError(f"--{name} {text}: no JSON ({error})") from error
    if not isinstance(value, dict):
        raise LaunchError(f"--{name} {text}: expected a JSON object")
    return value
