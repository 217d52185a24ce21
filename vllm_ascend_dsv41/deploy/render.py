"""What is generated from the recipes: launch scripts, container, Kubernetes and Ray files, tables of the guide.

``python -m vllm_ascend_dsv41.deploy.render`` in a checkout writes them; with ``--check`` it names those that differ.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2

from .launch import JEMALLOC, Item, Node, command, text_of
from .recipe import Recipe, load

SCRIPTS = ("a3x2", "a2x4", "a3x1-offload", "cpu-demo-x2")
IMAGES = {
    "Atlas 800 A3": "quay.io/ascend/vllm-ascend:deepseek-v4.1-flash-a3",
    "Atlas 800 A2": "quay.io/ascend/vllm-ascend:deepseek-v4.1-flash",
}
#: Options of the server whose value a shell variable holds, with what it holds where nobody sets it.
VARIABLES = {"host": "HOST", "port": "PORT"}
NODE = Node(rank=1, node0_ip="$NODE0_IP", local_ip="$LOCAL_IP", nic="$NIC_NAME")
OF_THE_NODE = ("headless", "data-parallel-start-rank")


def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader(__package__), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )


def script(name: str) -> str:
    """``scripts/serve-NAME.sh``."""
    recipe = load(name)
    nodes = recipe.topology.number("nodes")
    launch = command(
        recipe, Node(rank=min(1, nodes - 1), node0_ip="$NODE0_IP", local_ip="$LOCAL_IP", nic="$NIC_NAME"), "$MODEL_PATH"
    )
    lines = [_line(item, recipe) for item in launch.flags if item.name not in OF_THE_NODE]
    if nodes > 1:
        lines.insert(2, '"${NODE_OPTIONS[@]}"')
    environment = [
        {"name": item.name, "value": text_of(item.value), "free": "$" not in text_of(item.value)}
        for item in launch.environment
    ]
    settings = [
        ("NODE_RANK", "<NODE_RANK>", f"this server: 0 to {nodes - 1}"),
        ("NODE0_IP", "<NODE0_IP>", "address of node 0 on the network between the servers"),
        ("LOCAL_IP", "<LOCAL_IP>", "address of this server on that network"),
        ("NIC_NAME", "<NETWORK_INTERFACE>", "interface that has LOCAL_IP"),
    ]
    settings = (settings if nodes > 1 else []) + [
        ("MODEL_PATH", "<YOUR_MODEL_PATH>", "directory that `dsv41 quantize` wrote, the same on all servers")
    ]
    settings.append(
        ("HOST", recipe.flag("host"), "0.0.0.0 opens the server to every network: then set VLLM_API_KEY, too")
    )
    settings.append(("PORT", str(recipe.flag("port")), "of the API on node 0"))
    return (
        _templates()
        .get_template("serve.sh.j2")
        .render(
            recipe=recipe,
            nodes=nodes,
            local=recipe.topology.number("data_parallel_size_local"),
            settings=settings,
            environment=environment,
            lines=lines,
            jemalloc=JEMALLOC,
        )
    )


def _line(item: Item, recipe: Recipe) -> str:
    """One option as a line of a shell array."""
    if item.name in VARIABLES:
        return f'--{item.name} "${VARIABLES[item.name]}"'
    return " ".join(f'"{word}"' if word.startswith("$") else shlex.quote(word) for word in item.words)


def outputs() -> Iterator[tuple[str, str]]:
    """Path in the repository and content of everything that is generated."""
    for name in SCRIPTS:
        yield f"scripts/serve-{name}.sh", script(name)


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
