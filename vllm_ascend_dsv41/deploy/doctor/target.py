"""What is about to be launched, as the checks see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..fingerprint import SECRET
from ..launch import Node, command, json_option, parse_options
from ..recipe import Recipe, Sourced, parse_value


@dataclass(frozen=True, eq=False)
class Target:
    """A server on one node: ``options`` of ``vllm serve`` by name, ``environment`` it will have."""

    recipe: Recipe | None
    node: Node
    options: Mapping[str, Any]
    environment: Mapping[str, str]
    model: str = ""
    given: bool = False
    """Whether the command was given, not made from the recipe."""
    drift: tuple[str, ...] = field(default=())
    npu: bool = False
    """Without a recipe: whether this machine has NPUs."""

    @property
    def local(self) -> int:
        """Data-parallel replicas of this node: all where nothing else is said, as in vLLM."""
        return max(self.number("data-parallel-size-local", self.number("data-parallel-size", 1)), 1)

    @property
    def nodes(self) -> int:
        """Servers of the deployment, by what the options say."""
        return max(self.number("data-parallel-size", 1) // self.local, 1)

    def number(self, name: str, default: int) -> int:
        """A whole number among the options; the default where it is none."""
        try:
            return int(str(self.options.get(name, default)))
        except ValueError:
            return default

    def json(self, name: str) -> dict[str, Any]:
        """A JSON option. Raises LaunchError."""
        return json_option(self.options, name)

    @property
    def devices(self) -> int:
        """Devices that this node's ranks take."""
        return self.local * self.number("tensor-parallel-size", 1)

    @property
    def on_npu(self) -> bool:
        """Whether NPU checks apply."""
        if self.recipe is not None:
            return self.recipe.device == "npu"
        return self.npu or any(name.startswith(("ASCEND_", "HCCL_")) for name in self.environment)


def target_of(
    recipe: Recipe, node: Node, model: str, given: Sequence[str] | None, environment: Mapping[str, str]
) -> Target:
    """From the recipe, or from a command: words before ``serve`` are left out. Raises LaunchError."""
    if given is not None:
        words = list(given)
        arguments = words[words.index("serve") + 1 :] if "serve" in words else words
        options = parse_options(arguments)
        made = (
            parse_options(command(recipe, node, str(options.get("model", model) or "?")).arguments)
            if node.nic or recipe.topology.number("nodes") == 1
            else {}
        )
        drift = tuple(
            f"--{name} {'***' if SECRET.search(name) else options.get(name, '(not given)')}"
            for name in dict.fromkeys([*made, *options])
            if made and name not in ("model", "host", "port") and options.get(name) != made.get(name)
        )
        return Target(recipe, node, options, environment, str(options.get("model", model)), True, drift)
    launch = command(recipe, node, model)
    return Target(recipe, node, parse_options(launch.arguments), {**environment, **launch.variables}, model)


def as_recipe(recipe: Recipe, target: Target) -> Recipe:
    """The recipe with the options that the command really has: for the memory plan."""
    options = target.options
    flags: dict[str, Sourced] = {}
    for name in {*recipe.flags, *options}:
        if name in ("model", "headless") or name.startswith("data-parallel"):
            continue
        if name in ("tensor-parallel-size", "enable-expert-parallel") or name not in options:
            continue
        flags[name] = Sourced(value=_typed(options[name]), source="--set")
    place = recipe.topology
    changed = place.model_copy(
        update={
            "data_parallel_size": Sourced(value=target.number("data-parallel-size", 1), source="--set"),
            "data_parallel_size_local": Sourced(value=target.local, source="--set"),
            "tensor_parallel_size": Sourced(value=target.number("tensor-parallel-size", 1), source="--set"),
            "expert_parallel": Sourced(value=bool(options.get("enable-expert-parallel", False)), source="--set"),
        }
    )
    environment = dict(recipe.environment)
    for name in ("HCCL_BUFFSIZE", "VLLM_CPU_KVCACHE_SPACE"):
        if name in target.environment:
            environment[name] = Sourced(value=target.environment[name], source="--set")
    return recipe.model_copy(update={"flags": flags, "topology": changed, "environment": environment})


def _typed(value: Any) -> Any:
    return parse_value(value) if isinstance(value, str) else value
