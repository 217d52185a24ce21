"""``dsv41 serve``: vLLM's server with exactly our plugin, after a check that takes seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from ..quant import CheckpointError, Layout, open_checkpoint

USAGE = """usage: dsv41 serve MODEL [option of vllm serve ...]

MODEL is a directory that `dsv41 quantize` wrote. All options are passed to `vllm serve` unchanged;
`dsv41 serve --help=listgroup` shows their groups."""


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


def serve(arguments: Sequence[str]) -> int:
    """Run the server in this process until it is stopped."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if not any(argument.startswith("--help") for argument in arguments):
        preflight(arguments)
    os.environ.setdefault("VLLM_PLUGINS", plugin_names())
    # vLLM's own script asks for the version of a distribution named "vllm", which the CPU wheel does not
    # install; its serve command works without
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="dsv41")
    command = ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=False, dest="subparser")).set_defaults(
        dispatch_function=command.cmd
    )
    args = parser.parse_args(["serve", *arguments])
    command.validate(args)
    command.cmd(args)
    return 0
