"""What is generated from the recipes: launch scripts, container, Kubernetes and Ray files, tables of the guide.

``python -m vllm_ascend_dsv41.deploy.render`` in a checkout writes them; with ``--check`` it names those that differ.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from .launch import JEMALLOC, OF_THE_NODE, Item, Node, command, text_of
from .recipe import LISTENING, load
from .tables import documents

SCRIPTS = ("a3x2", "a2x4", "a3x1-offload", "cpu-demo-x2")
CLUSTERS = ("a3x2", "a2x4")  # also for Kubernetes and Ray
#: Options of the server whose value a shell variable holds.
VARIABLES = {flag: name for name, flag in LISTENING.items()}
#: What the guide mounts: path, and what it is on the host.
MOUNTS = (
    ("/usr/local/dcmi", "Directory"),
    ("/usr/local/Ascend/driver/tools/hccn_tool", "File"),
    ("/usr/local/bin/npu-smi", "File"),
    ("/usr/local/Ascend/driver/lib64", "Directory"),
    ("/usr/local/Ascend/driver/version.info", "File"),
    ("/etc/ascend_install.info", "File"),
    ("/etc/hccn.conf", "File"),
)
SHM_GIB = 512


def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )


def _parts(name: str) -> dict[str, Any]:
    """What the templates of a recipe have in common."""
    recipe = load(name)
    nodes = recipe.topology.number("nodes")
    node = Node(rank=min(1, nodes - 1), node0_ip="$NODE0_IP", local_ip="$LOCAL_IP", nic="$NIC_NAME")
    launch = command(recipe, node, "$MODEL_PATH")
    where = "directory that `dsv41 quantize` wrote, the same on all servers"
    of_the_node = [
        ("NODE_RANK", "<NODE_RANK>", f"this server: 0 to {nodes - 1}"),
        ("NODE0_IP", "<NODE0_IP>", "address of node 0 on the network between the servers"),
        ("LOCAL_IP", "<LOCAL_IP>", "address of this server on that network"),
        ("NIC_NAME", "<NETWORK_INTERFACE>", "interface that has LOCAL_IP"),
    ]
    return {
        "recipe": recipe,
        "nodes": nodes,
        "local": recipe.topology.number("data_parallel_size_local"),
        "settings": [
            *(of_the_node if nodes > 1 else []),
            ("MODEL_PATH", "<YOUR_MODEL_PATH>", where),
            (
                "DSV41_HOST",
                recipe.flag("host"),
                "0.0.0.0 opens the server to every network: then set VLLM_API_KEY, too",
            ),
            ("DSV41_PORT", str(recipe.flag("port")), "of the API on node 0"),
        ],
        "environment": [
            {"name": item.name, "value": text_of(item.value), "free": "$" not in text_of(item.value)}
            for item in launch.environment
        ],
        "lines": [_line(item) for item in launch.flags if item.name in VARIABLES or item.name not in OF_THE_NODE],
        "jemalloc": JEMALLOC,
    }


def script(name: str) -> str:
    """``scripts/serve-NAME.sh``."""
    parts = _parts(name)
    if parts["nodes"] > 1:
        # before bash 4.4 an empty array counts as unset
        parts["lines"].insert(2, '${NODE_OPTIONS[@]+"${NODE_OPTIONS[@]}"}')
    return _templates().get_template("serve.sh.j2").render(parts)


def ray_script(name: str) -> str:
    """``scripts/ray-NAME.sh``: one command on node 0, engines by Ray."""
    return _templates().get_template("ray.sh.j2").render(_parts(name))


def manifest(name: str) -> str:
    """``kubernetes/lws-NAME.yaml``."""
    from .plan import plan

    recipe = load(name)
    needed = sum(part.bytes for part in plan(recipe).host)
    mounts = [(f"driver-{n}", path, kind) for n, (path, kind) in enumerate(MOUNTS)]
    return (
        _templates()
        .get_template("lws.yaml.j2")
        .render(
            recipe=recipe,
            nodes=recipe.topology.number("nodes"),
            devices=recipe.topology.number("devices_per_node"),
            port=recipe.flag("port"),
            timeout=recipe.environment["VLLM_ENGINE_READY_TIMEOUT_S"].value,
            memory=SHM_GIB + -(-needed // (1 << 30)),
            shm=SHM_GIB,
            mounts=mounts,
        )
    )


def container(hardware: str, tag: str, devices: int) -> str:
    """``docker/run-TAG.sh``."""
    nodes = [f"/dev/davinci{n}" for n in range(devices)]
    return (
        _templates()
        .get_template("run.sh.j2")
        .render(
            hardware=hardware,
            tag=tag,
            devices=[*nodes, "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"],
            mounts=[path for path, _ in MOUNTS],
            files=[path for path, kind in MOUNTS if kind == "File"],
        )
    )


def _line(item: Item) -> str:
    """One option as a line of a shell array."""
    if item.name in VARIABLES:
        return f'--{item.name} "${VARIABLES[item.name]}"'
    return " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in item.words)


def outputs() -> Iterator[tuple[str, str]]:
    """Path in the repository and content of everything that is generated."""
    for name in SCRIPTS:
        yield f"scripts/serve-{name}.sh", script(name)
    for name in CLUSTERS:
        yield f"scripts/ray-{name}.sh", ray_script(name)
        yield f"kubernetes/lws-{name}.yaml", manifest(name)
    yield "docker/run-a3.sh", container("Atlas 800 A3", "a3", load("a3x2").topology.number("devices_per_node"))
    yield "docker/run-a2.sh", container("Atlas 800 A2", "a2", load("a2x4").topology.number("devices_per_node"))
    yield from documents(Path(__file__).resolve().parents[2])


def main(root: Path, check: bool) -> int:
    """Write or check. Returns the exit status."""
    different = []
    for path, content in outputs():
        file = root / path
        if file.is_file() and file.read_text(encoding="utf-8") == content:
            continue
        different.append(path)
        if not check:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
            if path.endswith(".sh"):
                file.chmod(0o755)
    for path in different:
        print(f"{path}: {'differs from the recipes' if check else 'written'}")
    return int(check and bool(different))


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2], "--check" in sys.argv[1:]))
