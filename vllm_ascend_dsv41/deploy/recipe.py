"""Launch recipes: data in ``recipes/*.yaml``, every value with its source."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Value = bool | int | float | str | list[Any] | dict[str, Any]
#: What ``--set`` may name beside flags of ``vllm serve``, in shell-style or YAML-style spelling.
TOPOLOGY = (
    "nodes",
    "devices_per_node",
    "device_memory_gib",
    "host_memory_gib",
    "data_parallel_size",
    "data_parallel_size_local",
    "tensor_parallel_size",
    "expert_parallel",
)


MOST_DRAFTED = 64
#: Options that depend on the node: ``launch.command`` gives them.
GIVEN_BY_THE_NODE = ("headless", "data-parallel-start-rank", "data-parallel-address", "data-parallel-rank", "model")
#: Variables that choose where the API listens, for scripts and ``dsv41 serve --recipe`` alike.
LISTENING = {"DSV41_HOST": "host", "DSV41_PORT": "port"}
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class RecipeError(ValueError):
    """A recipe that does not exist or does not hold together, with what was expected."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Sourced(_Strict):
    """A value and where it comes from: a key of the recipe's ``sources``, or ``--set``."""

    value: Value
    source: str


class Topology(_Strict):
    """Servers, devices and how the model is divided among them."""

    nodes: Sourced
    devices_per_node: Sourced
    device_memory_gib: Sourced
    host_memory_gib: Sourced
    data_parallel_size: Sourced
    data_parallel_size_local: Sourced
    tensor_parallel_size: Sourced
    expert_parallel: Sourced

    def number(self, name: str) -> int:
        """One of the counts."""
        return int(getattr(self, name).value)


class Recipe(_Strict):
    """One way to launch: topology, flags of ``vllm serve`` and environment.

    What depends on the node (addresses, ranks, ``--headless``) is not in it: ``launch.command`` adds that.
    """

    name: str
    title: dict[Literal["en", "zh"], str]
    device: Literal["npu", "cpu", "cuda", "rocm"]
    hardware: str
    checkpoint: Literal["ascend", "official"]
    written_for: dict[str, str]
    evidence: dict[Literal["en", "zh"], str] = Field(description="what of it was run, and by whom")
    sources: dict[str, str]
    topology: Topology
    flags: dict[str, Sourced]
    environment: dict[str, Sourced] = {}
    left_out: dict[str, str] = Field({}, description="options of the guide that are not given, and why")

    @model_validator(mode="after")
    def _holds_together(self) -> Recipe:
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        place, used = self.topology, set()
        for name, item in self.items():
            used.add(item.source)
            if item.source not in (*self.sources, "--set"):
                yield f"{name}: source {item.source!r} is not among {sorted(self.sources)}"
        if set(self.sources) - used:
            yield f"sources {sorted(set(self.sources) - used)} are not used"
        numbers = [name for name in TOPOLOGY if name != "expert_parallel"]
        wrong = [name for name in numbers if not _is_count(getattr(place, name).value)]
        if wrong:
            yield f"{', '.join(wrong)}: expected positive whole numbers"
            return
        if not isinstance(place.expert_parallel.value, bool):
            yield "expert_parallel: expected true or false"
        across, local = place.number("data_parallel_size"), place.number("data_parallel_size_local")
        nodes, each = place.number("nodes"), place.number("devices_per_node")
        if nodes * local != across:
            yield f"{nodes} nodes of data_parallel_size_local {local} are not data_parallel_size {across}"
        needed = ("host", "port", *(["data-parallel-rpc-port"] if nodes > 1 else []))
        missing = [name for name in needed if name not in self.flags]
        if missing:
            yield f"flags without {', '.join(missing)}"
        if self.device != "cpu" and local * place.number("tensor_parallel_size") > each:
            yield f"data_parallel_size_local x tensor_parallel_size is more than the {each} devices of a node"

    def items(self) -> Iterator[tuple[str, Sourced]]:
        """Every value with its source."""
        for name in TOPOLOGY:
            yield name, getattr(self.topology, name)
        yield from self.flags.items()
        yield from self.environment.items()

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks of all data-parallel replicas: the expert-parallel size."""
        return self.topology.number("data_parallel_size") * self.topology.number("tensor_parallel_size")

    @property
    def shape(self) -> str:
        """As people say it: DP4/TP8/EP32."""
        place = self.topology
        experts = f"/EP{self.ranks}" if place.expert_parallel.value else ""
        return f"DP{place.number('data_parallel_size')}/TP{place.number('tensor_parallel_size')}{experts}"

    def flag(self, name: str, default: Any = None) -> Any:
        """Value of a flag of ``vllm serve``, given without dashes."""
        return self.flags[name].value if name in self.flags else default

    def count(self, name: str, default: int) -> int:
        """A whole number among flags or variables, also as vLLM reads them: 128k, 1M. Raises RecipeError."""
        place = self.environment if name.isupper() else self.flags
        value = place[name].value if name in place else default
        match = re.fullmatch(r"(\d+)()|(\d+(?:\.\d+)?)([kKmMgG])", str(value))
        found = 0 if match is None else int(float(match[1] or match[3]) * UNITS[match[2] or match[4] or ""])
        if isinstance(value, bool) or found < 1:
            raise RecipeError(
                f"recipe {self.name}: {name} is {value!r}, expected a whole number, or 128k, 1M and so on"
            )
        return found

    @property
    def draft_tokens(self) -> int:
        """Tokens that a step drafts; 0 without --speculative-config. Raises RecipeError."""
        speculative = self.flag("speculative-config", {})
        tokens = speculative.get("num_speculative_tokens", 0) if isinstance(speculative, dict) else None
        if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= MOST_DRAFTED:
            raise RecipeError(
                f"recipe {self.name}: speculative-config is {speculative!r}, expected an object with "
                f"num_speculative_tokens up to {MOST_DRAFTED}"
            )
        return tokens


def _is_count(value: Value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def names() -> list[str]:
    """Recipes that come with this package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def _folder() -> Any:
    return files(__package__) / "recipes"


def load(name: str, settings: Sequence[str] = ()) -> Recipe:
    """A recipe by name, or from a file of one's own (``path/to/own.yaml``), with ``key=value`` settings.

    Raises RecipeError: an unknown name, a file that is none, a setting that cannot be.
    """
    if name.endswith((".yaml", ".yml")):
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"recipe {name}: {error}") from error
    elif name in names():
        text = (_folder() / f"{name}.yaml").read_text(encoding="utf-8")
    else:
        near = difflib.get_close_matches(name, names(), 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names())}, or a file NAME.yaml"
        raise RecipeError(f"recipe {name!r}: no such recipe; {hint}")
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"recipe {name}: no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise RecipeError(f"recipe {name}: expected an object with title, topology, flags and so on")
    document.setdefault("name", Path(name).stem)
    for setting in settings:
        _set(document, setting)
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        found = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'recipe'}: {_said(e)}" for e in error.errors())
        raise RecipeError(f"recipe {name}: {found}") from error


def _said(error: Any) -> str:
    return str(error["msg"]).removeprefix("Value error, ")


def _set(document: dict[str, Any], setting: str) -> None:
    """Put one ``key=value`` of ``--set`` in its place; ``key=`` alone leaves a flag out."""
    key, equals, text = setting.partition("=")
    key = key.strip().removeprefix("--")
    if not equals or not key:
        raise RecipeError(f"--set {setting}: expected key=value, for example --set max-num-seqs=16")
    if key in GIVEN_BY_THE_NODE:
        raise RecipeError(f"--set {setting}: {key} depends on the node, and comes from NODE_RANK, NODE0_IP and so on")
    topology, flags = document.get("topology"), document.get("flags")
    if not isinstance(topology, dict) or not isinstance(flags, dict):
        raise RecipeError(f"recipe {document['name']}: topology and flags are objects")
    name = key.replace("-", "_")
    name = "expert_parallel" if name == "enable_expert_parallel" else name
    variable = re.fullmatch(r"[A-Z][A-Z0-9_]*", key) is not None
    if variable:
        place = document.setdefault("environment", {})
    elif name in TOPOLOGY:
        place, key = topology, name
    else:
        place, key = flags, key.replace("_", "-")
    if not text.strip():
        if place is topology:
            raise RecipeError(f"--set {setting}: {key} needs a value")
        place.pop(key, None)
    else:
        place[key] = {"value": text if variable else parse_value(text), "source": "--set"}
    items = [item for group in (topology, flags, document.get("environment", {})) for item in group.values()]
    kept = {item.get("source") for item in items if isinstance(item, dict)}
    if isinstance(document.get("sources"), dict):
        document["sources"] = {name: text for name, text in document["sources"].items() if name in kept}


def from_environment(environment: Mapping[str, str]) -> list[str]:
    """Settings that variables make: where the API listens."""
    return [f"{flag}={environment[name]}" for name, flag in LISTENING.items() if environment.get(name)]


def parse_value(text: str) -> Value:
    """A value as people write it on a command line: JSON where it is JSON, else the text."""
    try:
        value: Value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return text if value is None else value
