"""What must be the same on all nodes of a deployment, in a form that can be compared."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..versions import versions
from .launch import ENVIRONMENT_OF_THE_NODE, OF_THE_NODE
from .recipe import parse_value

SMALL = ("config.json", "tokenizer.json", "generation_config.json", "quant_model_description.json")
VARIABLES = re.compile(
    r"^(VLLM_|HCCL_|ASCEND_|PYTORCH_|TORCH_|GLOO_|TP_|OMP_|DSV41_|TASK_QUEUE|LD_PRELOAD$|ACL_|NCCL_)"
)
#: Names of options and variables whose values are nobody's business.
SECRET = re.compile(r"(?:^|[_-])(?:key|token|secret|passw(?:or)?d|auth|credentials?|proxy)(?:$|[_-])", re.IGNORECASE)
#: Options of the API's server, which only node 0 runs.
API_ONLY = re.compile(
    r"(?:api-server-count|uds|root-path|middleware|response-role|log-config-file|enable-auto-tool-choice|served-model-name"
    r"|(?:ssl|uvicorn|allow|allowed|chat|tool|h11|cors|disable|enable)-.*(?:log|ssl|origin|header|method|template|parser|"
    r"credentials|max|level|file|media).*)"
)
INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
SAMPLE = 4096


def options_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Options of a command that all nodes must have in common, as text, without keys of the API."""
    return {
        name: json.dumps(parse_value(value) if isinstance(value, str) else value, sort_keys=True)
        for name, value in sorted(options.items())
        if name not in OF_THE_NODE and not SECRET.search(name) and not API_ONLY.fullmatch(name)
    }


def environment_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that change how a server runs, without secrets and without those of one node."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if VARIABLES.search(name) and not SECRET.search(name) and name not in (*ENVIRONMENT_OF_THE_NODE, *INTERFACES)
    }


def of_the_software() -> dict[str, str]:
    """Python, machine and the packages that serve."""
    return {"python": platform.python_version(), "machine": platform.machine(), **versions()}


def checkpoint(path: str | Path) -> dict[str, str]:
    """Digests of a checkpoint's small files, and one of its weight files: names, sizes, and samples of each. Empty
    where there is no directory."""
    if not str(path):
        return {}
    root = Path(path)
    found: dict[str, str] = {}
    try:
        files = sorted(file for file in root.rglob("*") if file.is_file())
    except OSError:
        return {}
    weights = hashlib.sha256()
    for file in files:
        name = str(file.relative_to(root))
        try:
            if file.suffix == ".safetensors":
                weights.update(f"{name} {file.stat().st_size}\n".encode())
                weights.update(_samples(file))
            elif name in SMALL or name.endswith(".index.json"):
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        except OSError as error:
            found[name] = f"unreadable: {error.strerror}"
    if files:
        found["weights"] = weights.hexdigest()[:16]
    return found


def _samples(file: Path) -> bytes:
    """The beginning and three places of a file: other data of the same sizes shows."""
    size, parts = file.stat().st_size, []
    with file.open("rb") as stream:
        for place in (0, size // 4, size // 2, size * 3 // 4):
            parts.append(os.pread(stream.fileno(), SAMPLE, place))
    return b"".join(parts)


def differences(mine: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """``name: mine / other's`` for what is not equal, at any depth."""
    found = []
    for name in sorted({*mine, *others}):
        one, other = mine.get(name), others.get(name)
        if one == other:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += [f"{name} {text}" for text in differences(one, other)]
        else:
            found.append(f"{name}: {_said(one)} / {_said(other)}")
    return found


def _said(value: Any) -> str:
    return "(not there)" if value is None else str(value)
