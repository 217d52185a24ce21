"""Command line and environment: what is known to fail, to hang or to be unsafe, from the words alone."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...fingerprint import SECRET, options_of
from ...launch import PLACEHOLDER, LaunchError
from ..host import Host
from ..report import Result, bad, good, skip, warn
from ..target import Target

PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
#: --additional-config of images of September 2026, which later ones refuse, or ignore (vllm-ascend#16925).
OLD_ENGRAM = ("enable_engram", "engram_storage", "enable_engram_ple_offload")
ENGRAM_KEYS = ("cpu_offload", "embedding_across_dp", "dp_shared_memory")
OFFLOAD_SEQS = 24  # vllm-ascend#16828: crashes at 24 to 32 requests with offloaded tables on one A3
READY_S, CONNECT_S = 3600, 600
MOST_RANKS = 1024  # that are looked at


def start_rank(host: Host, target: Target) -> Result:
    """--data-parallel-start-rank on node 0 chooses hybrid balancing, which refuses headless nodes."""
    name, found = "start-rank", target.options.get("data-parallel-start-rank")
    headless = bool(target.options.get("headless"))
    if target.nodes == 1 and found is None:
        return good(name, "one server")
    if not headless and found is not None:
        return bad(
            name,
            f"--data-parallel-start-rank {found} without --headless",
            "no start rank on the node that answers requests, not even 0",
            "leave it out on node 0: with it vLLM ends with 'Remote engine must not use --headless' "
            "(vllm-ascend#16204)",
        )
    if headless and found is None:
        return bad(
            name,
            "--headless without --data-parallel-start-rank",
            "node rank x --data-parallel-size-local",
            "give the first data-parallel rank of this node",
        )
    if target.recipe is not None and headless != (target.node.rank > 0):
        return bad(
            name,
            f"node {target.node.rank} {'with' if headless else 'without'} --headless",
            "--headless on all nodes but 0, which answers requests",
            "set NODE_RANK, and let the recipe's script give the option",
        )
    return good(name, "none on node 0" if found is None else f"{found}, headless")


def ranks(host: Host, target: Target) -> Result:
    """Ranks must tile 0 to data-parallel-size - 1: this node's part of it."""
    name = "ranks"
    size, local = target.number("data-parallel-size", 1), target.local
    first = target.number("data-parallel-start-rank", 0)
    expected = target.node.rank * local
    if size % max(local, 1) or first + local > size:
        return bad(
            name,
            f"ranks {first} to {first + local - 1} of {size}",
            f"--data-parallel-size-local that divides {size}",
            "give all nodes the same --data-parallel-size and --data-parallel-size-local",
        )
    if target.recipe is not None and target.nodes > 1 and first != expected:
        return bad(
            name,
            f"node {target.node.rank} starts at rank {first}",
            f"rank {expected}: node rank x --data-parallel-size-local {local}",
            "set NODE_RANK so that every node has another one; two nodes with the same ranks wait for each other",
        )
    experts = ", experts divided" if target.options.get("enable-expert-parallel") else ""
    return good(
        name,
        f"{first} to {first + local - 1} of {size}, {target.number('tensor-parallel-size', 1)} devices each{experts}",
    )


def placeholders(host: Host, target: Target) -> Result:
    """<NODE0_IP> and the like left in place."""
    name = "placeholders"
    left = [f"{key}={value}" for key, value in target.environment.items() if _ours(key) and PLACEHOLDER.search(value)]
    left += [
        f"--{key} {value}"
        for key, value in target.options.items()
        if isinstance(value, str) and PLACEHOLDER.search(value) and not SECRET.search(key)
    ]
    if left:
        return bad(
            name,
            ", ".join(left),
            "this server's values",
            "fill in NODE_RANK, NODE0_IP, LOCAL_IP, NIC_NAME and MODEL_PATH",
        )
    return good(name, "none")


def _ours(name: str) -> bool:
    return name.startswith(("HCCL_", "GLOO_", "TP_", "VLLM_", "ASCEND_")) and not SECRET.search(name)


def timeouts(host: Host, target: Target) -> Result:
    """Ranks that come late must not end the others."""
    name, environment = "timeouts", target.environment
    ready, connect = environment.get("VLLM_ENGINE_READY_TIMEOUT_S"), environment.get("HCCL_CONNECT_TIMEOUT")
    for key, value in (("VLLM_ENGINE_READY_TIMEOUT_S", ready), ("HCCL_CONNECT_TIMEOUT", connect)):
        if value is not None and not value.isdecimal():
            return bad(name, f"{key}={value}", "seconds", f"export {key}={READY_S}")
    if target.on_npu and (ready is None or int(ready) < READY_S):
        return bad(
            name,
            f"VLLM_ENGINE_READY_TIMEOUT_S={ready or '(not set: 600)'}",
            f"{READY_S} or more: weights load and graphs are captured meanwhile",
            f"export VLLM_ENGINE_READY_TIMEOUT_S={READY_S}",
        )
    if connect is not None and not 120 <= int(connect) <= 7200:
        return bad(name, f"HCCL_CONNECT_TIMEOUT={connect}", "120 to 7200", "export HCCL_CONNECT_TIMEOUT=1800")
    if target.on_npu and target.nodes > 1 and int(connect or 120) < CONNECT_S:
        return warn(
            name,
            f"HCCL_CONNECT_TIMEOUT={connect or '(not set: 120)'}",
            f"{CONNECT_S} or more, the same on all nodes",
            "export HCCL_CONNECT_TIMEOUT=1800: nodes that load slower end the others (vllm-ascend#5468)",
        )
    return good(name, f"ready {ready or 'vLLM default'}, HCCL connect {connect or 'default'}")


def runner(host: Host, target: Target) -> Result:
    """Model runner V2 and pipeline parallelism."""
    name = "runner"
    if target.number("pipeline-parallel-size", 1) > 1:
        return bad(
            name,
            f"--pipeline-parallel-size {target.options['pipeline-parallel-size']}",
            "1",
            "divide by tensor, data and expert parallelism",
        )
    value = target.environment.get("VLLM_USE_V2_MODEL_RUNNER")
    if value not in (None, "", "0"):
        return bad(
            name,
            f"VLLM_USE_V2_MODEL_RUNNER={value}",
            "0: drafts and Engram history are built for V1",
            "export VLLM_USE_V2_MODEL_RUNNER=0",
        )
    return good(name, "V1")


def engram_options(host: Host, target: Target) -> Result:
    """Switches of old images, unknown keys, and what does not go together."""
    name = "engram"
    additional, engram = target.json("additional-config"), target.json("engram-config")
    old = [key for key in OLD_ENGRAM if key in additional]
    if old:
        return bad(
            name,
            f"--additional-config with {', '.join(old)}",
            "--engram-config: these keys are of images of September 2026; later ones refuse them or leave tables "
            "in device memory",
            '--engram-config \'{"cpu_offload":true,"dp_shared_memory":true}\', or {"cpu_offload":false} for '
            "device memory",
        )
    unknown = [key for key in engram if key not in ENGRAM_KEYS]
    if unknown:
        return bad(
            name,
            f"--engram-config with {', '.join(unknown)}",
            f"{', '.join(ENGRAM_KEYS)} (vLLM 0.30.0)",
            "leave the others out",
        )
    if engram.get("dp_shared_memory") and not engram.get("cpu_offload", True):
        return bad(
            name, "dp_shared_memory without cpu_offload", "shared tables are in host memory", "set cpu_offload to true"
        )
    if engram.get("dp_shared_memory") and engram.get("embedding_across_dp"):
        return bad(name, "dp_shared_memory and embedding_across_dp", "one of them", "keep dp_shared_memory")
    offload = engram.get("cpu_offload", True)
    local = target.local
    if target.on_npu and not engram:
        return warn(
            name,
            "no --engram-config: vLLM 0.30.0 puts tables in host memory, other versions in device memory",
            "say where the tables go",
            "--engram-config '{\"cpu_offload\":false}' as in the guide, or with true and dp_shared_memory",
        )
    if (
        offload
        and local > 1
        and not engram.get("dp_shared_memory")
        and not engram.get("embedding_across_dp")
        and target.on_npu
    ):
        return warn(
            name, f"{local} copies of 206 GiB in host memory", "one", 'add "dp_shared_memory":true to --engram-config'
        )
    return good(
        name,
        "tables in host memory" + (", one copy" if engram.get("dp_shared_memory") else "")
        if offload
        else "tables in device memory",
    )


def cpu_binding(host: Host, target: Target) -> Result:
    """Binding moves pages of registered tables."""
    name = "cpu-binding"
    offload = target.json("engram-config").get("cpu_offload", True)
    if target.on_npu and target.json("additional-config").get("enable_cpu_binding") and offload:
        return warn(
            name,
            "enable_cpu_binding with Engram tables in host memory",
            "one of them: binding migrates pages of registered memory, the start takes minutes or hangs "
            "(vllm-ascend#17286, #17348)",
            "set enable_cpu_binding to false",
        )
    return good(name, "no conflict with tables in host memory")


def offload_concurrency(host: Host, target: Target) -> Result:
    """One A3 with offloaded tables crashed at 24 requests and more."""
    name, seqs = "concurrency", target.number("max-num-seqs", 32)
    single = target.on_npu and target.nodes == 1 and target.json("engram-config").get("cpu_offload", True)
    if single and seqs >= OFFLOAD_SEQS:
        return warn(
            name,
            f"--max-num-seqs {seqs} on one server with offloaded tables",
            f"less than {OFFLOAD_SEQS}: an early build ended with 507011 at 24 to 32 requests (vllm-ascend#16828)",
            "begin with --max-num-seqs 4 and raise it step by step",
        )
    return good(name, f"--max-num-seqs {seqs}")


def proxies(host: Host, target: Target) -> Result:
    """Proxies take requests between nodes."""
    name = "proxy"
    found = [key for key in PROXIES if target.environment.get(key)]
    if not found:
        return good(name, "none set")
    excluded = target.environment.get("no_proxy", "") + "," + target.environment.get("NO_PROXY", "")
    wanted = [address for address in ("127.0.0.1", target.node.node0_ip, target.node.local_ip) if address]
    missing = [address for address in wanted if address not in excluded.split(",")]
    if not missing:
        return good(name, f"{', '.join(found)}; addresses of the nodes excluded")
    return warn(name, f"{', '.join(found)} set", f"no_proxy with {', '.join(missing)}", f"unset {' '.join(found)}")


def preload(host: Host, target: Target) -> Result:
    """A library to preload that is not there is only a warning of the loader's."""
    name = "preload"
    libraries = [part for part in target.environment.get("LD_PRELOAD", "").replace(" ", ":").split(":") if part]
    missing = [library for library in libraries if "/" in library and host.size(library) is None]
    if missing:
        return bad(
            name,
            f"LD_PRELOAD names {', '.join(missing)}",
            "files that exist; the loader ignores others with a warning",
            "Debian and Ubuntu: apt install libjemalloc2; openEuler: /usr/lib64/libjemalloc.so.2",
        )
    return good(name, ", ".join(libraries) or "nothing preloaded")


def remote_code(host: Host, target: Target) -> Result:
    """Code and pickles from the checkpoint."""
    name = "remote-code"
    loading = str(target.options.get("load-format", "auto"))
    if target.options.get("trust-remote-code", False) is not False:
        return warn(
            name,
            "--trust-remote-code",
            "left out: vLLM 0.30.0 knows this model, and nothing of a checkpoint must run",
            "leave it out",
        )
    if loading not in ("auto", "safetensors", "dummy"):
        return bad(
            name,
            f"--load-format {loading}",
            "safetensors: other formats can run code when they are read",
            "leave it out",
        )
    return good(name, "not trusted; safetensors only")


def access(host: Host, target: Target) -> Result:
    """Who reaches the API, and the ports that nothing guards."""
    name = "access"
    if target.environment.get("VLLM_SERVER_DEV_MODE") not in (None, "", "0"):
        return bad(
            name,
            "VLLM_SERVER_DEV_MODE is set",
            "not set: it opens endpoints that run what they are sent",
            "unset VLLM_SERVER_DEV_MODE",
        )
    between = target.options.get("data-parallel-address")
    if isinstance(between, str) and _public(between):
        return warn(
            name,
            f"--data-parallel-address {between} is a public address: its ports have no authentication",
            "an address of a network that only the nodes are on",
            "use the private network between the servers, and a firewall that lets in nothing but the API port",
        )
    if target.options.get("headless"):
        return good(name, "no API here; ports between nodes must be reachable for the nodes alone")
    where = str(target.options.get("host", "")) or "0.0.0.0"
    keyed = bool(target.environment.get("VLLM_API_KEY")) or "api-key" in target.options
    if "api-key" in target.options:
        return warn(
            name,
            "--api-key: every user of the machine sees the key in the process list",
            "VLLM_API_KEY",
            "export VLLM_API_KEY instead",
        )
    if not _loopback(where) and not keyed:
        return warn(
            name,
            f"--host {where} without an API key",
            "127.0.0.1, or an address and a key",
            "export VLLM_API_KEY=..., or --host 127.0.0.1 behind a proxy; a key guards /v1 only, so let a proxy "
            "pass nothing else",
        )
    return good(name, f"{where}, {'with' if keyed else 'no'} API key")


def _loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _public(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_global or found.is_unspecified


def recipe_drift(host: Host, target: Target) -> Result:
    """Options that are not the recipe's: meant, or a slip."""
    name = "recipe"
    if target.recipe is None:
        return skip(name, "no recipe named")
    if not target.drift:
        return good(name, f"{target.recipe.name}: {target.recipe.shape}")
    topology = [
        text for text in target.drift if text.startswith(("--data-parallel-size", "--tensor", "--enable-expert"))
    ]
    if topology:
        return warn(
            name,
            f"not {target.recipe.name}'s: {', '.join(topology)}",
            target.recipe.shape,
            "the same on all nodes, or another recipe",
        )
    return good(name, f"{target.recipe.name}, but {', '.join(target.drift)}")


CHECKS: dict[str, Callable[[Host, Target], Result]] = {
    "recipe": recipe_drift,
    "placeholders": placeholders,
    "start-rank": start_rank,
    "ranks": ranks,
    "runner": runner,
    "engram": engram_options,
    "cpu-binding": cpu_binding,
    "concurrency": offload_concurrency,
    "timeouts": timeouts,
    "proxy": proxies,
    "preload": preload,
    "remote-code": remote_code,
    "access": access,
}
#: Of these, what a command line says without the machine it will run on.
WORDS_ONLY = tuple(name for name in CHECKS if name not in ("recipe", "preload"))


def tiling(targets: Iterable[Target]) -> Result:
    """All nodes together: ranks 0 to N - 1, each once."""
    held: dict[int, int] = {}
    size = 0
    for target in targets:
        size = target.number("data-parallel-size", 1)
        first = target.number("data-parallel-start-rank", 0)
        local = min(target.local, MOST_RANKS)
        for rank in range(first, first + local):
            held[rank] = held.get(rank, 0) + 1
    twice = [rank for rank, count in held.items() if count > 1]
    missing = [rank for rank in range(min(size, MOST_RANKS)) if rank not in held]
    if twice or missing:
        return bad(
            "tiling",
            f"data-parallel ranks held twice: {twice}, by nobody: {missing}",
            f"0 to {size - 1}, each once",
            "give every node its own NODE_RANK",
        )
    return good("tiling", f"ranks 0 to {size - 1}, each once")


def same_options(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Options that differ between nodes although they must not."""
    common = [options_of(options) for options in targets]
    return sorted({name for one in common for name in {**one, **common[0]} if one.get(name) != common[0].get(name)})


__all__ = ["CHECKS", "WORDS_ONLY", "LaunchError", "same_options", "tiling"]
