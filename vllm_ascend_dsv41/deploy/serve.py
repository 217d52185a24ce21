"""``dsv41 serve``: vLLM's server with exactly our plugin, after a check that takes seconds."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from ..quant import CheckpointError, Layout, open_checkpoint
from .fingerprint import SECRET
from .launch import LaunchError, Node, command, explain, jemalloc, parse_options, text_of
from .recipe import Recipe, from_environment, load
from .watch import Watch, watched

USAGE = """usage: dsv41 serve MODEL [option of vllm serve ...]
       dsv41 serve --recipe NAME [MODEL] [option of vllm serve ...]

MODEL is a directory that `dsv41 quantize` wrote. All options are passed to `vllm serve` unchanged;
`dsv41 serve --help=listgroup` shows their groups.

with a recipe (`dsv41 plan --list` shows them), or a file of one's own, NAME.yaml:
  --node-rank N --node0-ip IP --local-ip IP --nic NAME
                    this server among several; otherwise from NODE_RANK, NODE0_IP, LOCAL_IP, NIC_NAME, MODEL_PATH
  --set KEY=VALUE   change a value of the recipe; KEY= leaves an option out. May be repeated
  --explain         print every option with its source, and start nothing
  --dry-run         print environment and command, and start nothing
always:
  --startup-report FILE   what one replica's first rank says of itself when it is ready, as JSON"""

OWN = {
    "recipe": "",
    "node-rank": "NODE_RANK",
    "node0-ip": "NODE0_IP",
    "local-ip": "LOCAL_IP",
    "nic": "NIC_NAME",
    "startup-report": "",
    "set": "",
}
SWITCHES = ("explain", "dry-run")
STARTUP_REPORT = "DSV41_STARTUP_REPORT"


@dataclass
class Own:
    """Options of ours among the words of the command line, and the words that are vLLM's."""

    values: dict[str, str]
    settings: list[str]
    switches: set[str]
    rest: list[str]

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Own:
        """Raises LaunchError: an option without its value."""
        own, words = cls({}, [], set(), []), iter(arguments)
        for word in words:
            name, equals, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or (name not in OWN and name not in SWITCHES):
                own.rest.append(word)
            elif name in SWITCHES:
                own.switches.add(name)
            else:
                given = value if equals else next(words, None)
                if given is None:
                    raise LaunchError(f"--{name} needs a value")
                if name == "set":
                    own.settings.append(given)
                else:
                    own.values[name] = given
        return own

    def node(self) -> Node:
        """This server, by options or by the environment. Raises LaunchError."""
        found = {
            name: self.values.get(name) or os.environ.get(variable, "") for name, variable in OWN.items() if variable
        }
        rank = found["node-rank"] or "0"
        if not rank.isdecimal():
            raise LaunchError(f"node rank {rank!r}: expected 0, 1, ...")
        return Node(int(rank), found["node0-ip"], found["local-ip"], found["nic"])


def plugin_names() -> str:
    """Value of VLLM_PLUGINS: our plugin and vllm-ascend's general ones, no second platform, no second V4.1 model."""
    own = ["dsv41"]
    for entry in entry_points(group="vllm.general_plugins"):
        module = entry.value.partition(":")[0]
        if module.partition(".")[0] == "vllm_ascend" and entry.name != "ascend_model":
            own.append(entry.name)
    return ",".join(own)


def option_value(arguments: Sequence[str], name: str) -> str | None:
    """Value of ``name VALUE`` or ``name=VALUE``; the last one counts."""
    value = None
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            value = arguments[i + 1]
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


def preflight(arguments: Sequence[str]) -> None:
    """Check the checkpoint before vLLM is imported. Raises CheckpointError, ConfigError."""
    model = arguments[0] if arguments and not arguments[0].startswith("-") else option_value(arguments, "--model")
    if model is None:  # after other options: it cannot be told from their values, except that it is a directory
        model = next((argument for argument in arguments if Path(argument, "config.json").is_file()), None)
    quantization = option_value(arguments, "--quantization") or option_value(arguments, "-q")
    if model is None or quantization not in (None, "ascend"):
        return
    if not Path(model).exists() and quantization is None and not model.startswith((".", "/", "~")):
        return  # a name on a hub, for vLLM to resolve
    checkpoint = open_checkpoint(model)
    if checkpoint.layout is Layout.OFFICIAL:
        raise CheckpointError(
            f"{model}: this is the official checkpoint; convert it first: dsv41 quantize {model} DST --weights w8a8"
        )


def from_recipe(own: Own, look: bool = False) -> tuple[Recipe, list[str], dict[str, str], str]:
    """Recipe, arguments of the server, variables to set, and the explanation. ``look``: nothing will be started, and
    what this server is need not be known. Raises RecipeError, LaunchError."""
    recipe = load(own.values["recipe"], [*from_environment(os.environ), *own.settings])
    rest = list(own.rest)
    first = bool(rest) and not rest[0].startswith("-")
    model = rest.pop(0) if first else next((word for word in rest if Path(word, "config.json").is_file()), "")
    if not first and model:
        rest.remove(model)  # behind other options
    model, node = model or os.environ.get("MODEL_PATH", ""), own.node()
    if look:
        node = Node(node.rank, node.node0_ip or "<NODE0_IP>", node.local_ip or "<LOCAL_IP>", node.nic or "<NIC_NAME>")
    launch = command(recipe, node, model or ("<MODEL>" if look else ""), check=not look)
    variables = {}
    for item in launch.environment:
        kept = None if item.origin.startswith("node") else os.environ.get(item.name) or None
        variables[item.name] = text_of(item.value) if kept is None else kept
    library = jemalloc() if recipe.device == "npu" else None
    before = os.environ.get("LD_PRELOAD", "")
    if library is not None and "jemalloc" not in before:
        variables["LD_PRELOAD"] = library + (f":{before}" if before else "")
    text = explain(recipe, launch)
    if rest:
        words = ", ".join(f"--{name} {_shown(name, value)}".strip() for name, value in parse_options(rest).items())
        text += f"\nbehind them, from the command line, which wins: {words}"
    set_already = [name for name, value in variables.items() if os.environ.get(name) == value]
    if set_already:
        text += f"\nas the environment has it: {', '.join(set_already)}"
    return recipe, [*launch.arguments, *rest], variables, text


def _shown(name: str, value: object) -> str:
    """A value as it may be printed."""
    return "" if value is True else "***" if SECRET.search(name) else str(value)


def _shown_words(words: Sequence[str]) -> list[str]:
    """A command as it may be printed."""
    shown = list(words)
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if word.startswith("--") and SECRET.search(name):
            if equals:
                shown[at] = f"{name}=***"
            elif at + 1 < len(words):
                shown[at + 1] = "***"
    return shown


def serve(arguments: Sequence[str]) -> int:
    """Run the server in this process until it is stopped. Raises LaunchError, RecipeError, CheckpointError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    own = Own.of(arguments)
    arguments = own.rest
    if "startup-report" in own.values:
        os.environ[STARTUP_REPORT] = str(Path(own.values["startup-report"]).absolute())
    if "recipe" in own.values:
        look = "explain" in own.switches
        recipe, arguments, variables, explanation = from_recipe(own, look)
        if look:
            print(explanation)
            return 0
        if "dry-run" in own.switches:
            print("\n".join(f"{name}={shlex.quote(value)}" for name, value in variables.items()))
            print(shlex.join(["dsv41", "serve", *_shown_words(arguments)]))
            return 0
        os.environ.update(variables)
        if "LD_PRELOAD" in variables:  # of a process that starts
            os.execv(sys.executable, [sys.executable, "-m", "vllm_ascend_dsv41.cli", "serve", *arguments])
        if recipe.checkpoint == "official":
            os.environ.setdefault("VLLM_PLUGINS", plugin_names())
            return _run(arguments)
    elif own.switches or own.settings or set(own.values) - {"startup-report"}:
        given = [*own.switches, *(["set"] if own.settings else []), *own.values]
        raise LaunchError(f"--{', --'.join(given)}: only with --recipe NAME")
    if not any(argument.startswith("--help") for argument in arguments):
        preflight(arguments)
    os.environ.setdefault("VLLM_PLUGINS", plugin_names())
    return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    """vLLM's server, watched where there are several nodes."""
    nodes = watched(arguments)
    watch = Watch(nodes) if nodes is not None else None
    with ExitStack() as running:
        if watch is not None:
            running.enter_context(watch)
        try:
            _vllm(arguments)
        except (Exception, KeyboardInterrupt, SystemExit):
            if watch is None or watch.failure is None:
                raise
    if watch is not None and watch.failure is not None:
        raise LaunchError(watch.failure)
    return 0


def _vllm(arguments: Sequence[str]) -> None:
    # vLLM's own script asks for the version of a distribution named "vllm", which the CPU wheel does not
    # install; its serve command works without
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="dsv41")
    subcommand = ServeSubcommand()
    subcommand.subparser_init(parser.add_subparsers(required=False, dest="subparser")).set_defaults(
        dispatch_function=subcommand.cmd
    )
    args = parser.parse_args(["serve", *arguments])
    subcommand.validate(args)
    subcommand.cmd(args)
