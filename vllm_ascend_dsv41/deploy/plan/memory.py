"""The memory of one launch, put together: per rank, per node, what limits it and what would fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ..recipe import Recipe, RecipeError
from . import device as devices
from .activations import Activations, activations
from .cache import Caches, Groups, blocks_per_request
from .device import GIB, MIB
from .divisions import divisions
from .images import picture_bytes, tower_ranks
from .model import Model, released
from .published import comparisons, official_token_bytes
from .weights import Division, official_kinds, official_per_rank, per_rank, table_bytes

COMPUTED, ESTIMATED = "computed", "estimated"
PROCESS = 3 * GIB  # of host memory: a rank's Python, PyTorch and CANN
HOST_RESERVE = 16 * GIB
OFFICIAL_TOKEN_BYTES = round(38.5 * GIB / 20_000_000)
CONTEXTS = (8192, 32768, 131072, 262144, 524288, 1048576)


@dataclass(frozen=True)
class Part:
    """One use of memory. ``basis``: how its bytes were found, or where they were measured."""

    name: str
    bytes: int
    how: str
    basis: str


@dataclass
class MemoryPlan:
    """What a launch needs and what it allows. Bytes; ``rank`` adds up to ``usable``."""

    recipe: str
    shape: str
    model: str
    usable: int
    rank: list[Part]
    host: list[Part]
    host_available: int
    host_limits: dict[str, Any]
    cache: dict[str, Any]
    graphs: dict[str, Any]
    exchange: dict[str, Any]
    limits: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    published: list[dict[str, Any]] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether nothing was found that would end the start."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Everything, for other programs."""
        return {**asdict(self), "fits": self.fits}


@cache
def _published() -> list[dict[str, Any]]:
    return comparisons(released().config, released().tensors)


class _Planner:
    """The steps from recipe and model to a plan."""

    def __init__(self, recipe: Recipe, model: Model) -> None:
        self.recipe, self.model = recipe, model
        place = recipe.topology
        self.tensor, self.data = place.number("tensor_parallel_size"), place.number("data_parallel_size")
        self.local = place.number("data_parallel_size_local")
        self.expert = bool(place.expert_parallel.value)
        self.text = model.config["text_config"]
        self.draft = recipe.draft_tokens
        self.longest = recipe.count("max-model-len", self.text["max_position_embeddings"])
        self.seqs = recipe.count("max-num-seqs", 256 if recipe.device != "npu" else 32)
        self.budget = recipe.count("max-num-batched-tokens", 8192)
        self.share = _share(recipe)
        self.engram = _object(recipe, "engram-config")
        self.compilation = _object(recipe, "compilation-config")
        self.offload = bool(self.engram.get("cpu_offload", True))
        self.facts = devices.of(recipe.device)
        self.usable = place.number("device_memory_gib") * GIB - self.facts.reserved
        block = recipe.count("block-size", 128)
        if block % 2:
            raise RecipeError(f"recipe {recipe.name}: block-size is {block}, expected an even number: 128")
        self.vision = model.config.get("vision_config") or {}
        self.tower = tower_ranks(recipe, self.vision, self.tensor)
        self.caches = Caches.of(model.config, recipe.device, block, self.draft)
        self.buffsize = recipe.count("HCCL_BUFFSIZE", 200)
        self.problems = list(divisions(recipe, self.text, self.engram))
        self.notes: list[str] = []
        unused = place.number("devices_per_node") - self.local * self.tensor
        if recipe.checkpoint == "ascend" and unused > 0:
            self.notes.append(f"{unused} devices of each server are not used")

    def weights(self) -> list[Part]:
        """By kind, and the tables where the device holds them."""
        if self.recipe.checkpoint == "official":
            held = official_per_rank(self.model.tensors, self.text, self.tensor, self.data if self.expert else 1)
            basis = "official checkpoint as stored, experts in tiles of 128"
        else:
            experts = self.tensor * self.data if self.expert else 1
            division = Division(self.tensor, experts, self.draft > 0, self.model.rotated, self.tower)
            held, basis = (
                per_rank(self.model.tensors, self.text, self.model.weights, division),
                "inventory of the checkpoint",
            )
        parts = [Part(name, size, COMPUTED, basis) for name, size in sorted(held.items(), key=lambda item: -item[1])]
        if not self.offload and self.tables:
            shards = self.tensor * (self.local if self.engram.get("embedding_across_dp") else 1)
            size = -(-self.tables // shards)
            parts.append(Part("Engram tables", size, COMPUTED, f"whole hash columns, {shards} shards"))
        return parts

    @property
    def tables(self) -> int:
        """Bytes of one copy of the Engram tables."""
        if self.recipe.checkpoint == "official":
            return official_kinds(self.model.tensors)["Engram tables"]
        return table_bytes(self.model.tensors, self.model.weights, 1)

    def beside(self, work: Activations) -> list[Part]:
        """What is neither weights nor cache."""
        facts = self.facts
        parts = [Part("activations", work.peak, ESTIMATED, work.basis)]
        if self.tower:
            size = picture_bytes(self.vision, self.text["hidden_size"], self.budget, work.peak)
            parts.append(Part("pictures", size, ESTIMATED, "the encoder cache, and the largest picture in the tower"))
        if self.recipe.device == "npu":
            buffers = devices.hccl(self.tensor, self.data, self.expert, self.buffsize)
            text = ", ".join(f"{name} 2 x {size} MB" for name, size in buffers.groups)
            parts.append(Part("HCCL buffers", buffers.bytes, ESTIMATED, f"{text} (vllm-ascend 0.30.0rc2, CANN)"))
        parts.append(Part("other of the runtime", facts.other, ESTIMATED, facts.other_basis))
        parts.append(Part("device context", facts.context, ESTIMATED, facts.context_basis))
        return [part for part in parts if part.bytes]

    def host(self) -> list[Part]:
        """Of one node."""
        ranks = self.local * self.tensor
        parts = [Part("processes", ranks * PROCESS, ESTIMATED, f"{ranks} ranks of 3 GiB; not measured on an NPU")]
        if self.offload and self.tables:
            shared = self.local == 1 or self.engram.get("dp_shared_memory") or self.engram.get("embedding_across_dp")
            copies = 1 if shared else self.local
            basis = "one copy of the node" if copies == 1 else f"{copies} copies, one per replica of the node"
            parts.append(Part("Engram tables", copies * self.tables, COMPUTED, basis))
            if copies > 1:
                self.notes.append(
                    f"{copies} copies of the Engram tables on a node; --engram-config "
                    '\'{"cpu_offload":true,"dp_shared_memory":true}\' keeps one'
                )
        parts.append(Part("reserve", HOST_RESERVE, ESTIMATED, "page cache while weights load, the rest of the machine"))
        return parts

    def _host_limits(self, needed: int) -> dict[str, Any]:
        """What a container must be allowed. The tables are no file: /dev/shm holds vLLM's and HCCL's messages only."""
        ranks = self.local * self.tensor
        return {
            "control_group_gib": -(-needed // GIB),
            "dev_shm_gib": f"{ranks} at least, one per rank by estimate; the guide gives 512",
            "locked_memory": "unlimited" if self.offload and self.recipe.device == "npu" else "as it is",
        }

    def plan(self) -> MemoryPlan:
        """Everything."""
        work = activations(
            self.text, self.recipe.hardware, self.budget, self.seqs, self.draft, self.tensor, self.data, self.expert
        )
        weights, beside = self.weights(), self.beside(work)
        graphs = 0 if self.recipe.flag("enforce-eager") else self.facts.graphs
        used = sum(part.bytes for part in [*weights, *beside])
        given = self.recipe.flag("kv-cache-memory-bytes")
        if self.recipe.device == "cpu":
            pool = self.recipe.count("VLLM_CPU_KVCACHE_SPACE", 1) * GIB
        elif given:
            pool = self.recipe.count("kv-cache-memory-bytes", 0)
        else:
            pool = max(int(self.share * self.usable) - used, 0)
        groups = self.caches.groups
        blocks = pool // groups.block_bytes
        headroom = self.usable - used - pool - graphs
        parts = [*weights, *beside, Part("key-value cache", pool, COMPUTED, "given" if given else "the budget's rest")]
        if graphs:
            parts.append(Part("decode graphs", graphs, ESTIMATED, self.facts.graphs_basis))
        parts.append(Part("headroom", headroom, COMPUTED, f"of {self.usable / GIB:.2f} GiB usable"))
        if self.recipe.checkpoint == "official":
            cache, limits = self._official_cache(pool)
        else:
            cache, limits = self._cache(groups, blocks), self._limits(blocks, used)
        self._problems(headroom, blocks, used)
        movable = not self.offload and self.tables and self.recipe.checkpoint == "ascend"
        if movable and self.recipe.device == "npu" and not given and pool and not self.problems:
            freed = (pool + next(part.bytes for part in weights if part.name == "Engram tables")) // groups.block_bytes
            self.notes.append(
                f"Engram tables in host memory would leave a cache for {freed // self._needed(self.longest)} "
                "sequences of "
                f"{self.longest} tokens instead of {blocks // self._needed(self.longest)}: --set "
                '\'engram-config={"cpu_offload":true,"dp_shared_memory":true}\''
            )
        host = self.host()
        available = self.recipe.topology.number("host_memory_gib") * GIB
        needed = sum(part.bytes for part in host)
        if self.recipe.device != "cpu" and needed > available:
            self.problems.append(
                f"a node needs {needed / GIB:.0f} GiB of host memory and has {available / GIB:.0f} (host_memory_gib); "
                "share one copy of the Engram tables (dp_shared_memory), or keep them in device memory"
            )
        return MemoryPlan(
            self.recipe.name,
            self.recipe.shape,
            self.model.name,
            self.usable,
            parts,
            host,
            available,
            self._host_limits(needed),
            cache,
            self._graphs(),
            self._exchange(),
            limits,
            self.problems,
            self.notes,
        )

    def _needed(self, length: int, budget: int | None = None) -> int:
        return blocks_per_request(self.caches, length, budget or self.budget)

    def _cache(self, groups: Groups, blocks: int) -> dict[str, Any]:
        length = min(self.longest, self.text["max_position_embeddings"])
        rows = groups.compressed * -(-length // self.caches.block_size)
        window = self._needed(length) - rows - groups.ring
        of_a_sequence = {"compressed": rows, "window": window, "ring": groups.ring}
        return {
            "block_tokens": self.caches.block_size,
            "block_bytes": groups.block_bytes,
            "groups": {"compressed": groups.compressed, "window": groups.window, "ring": groups.ring},
            "token_bytes": self.caches.token_bytes,
            "by_cache": {
                page.name: page.bytes for page in [*self.caches.compressed, *self.caches.window, *self.caches.ring]
            },
            "sequence_bytes": {name: count * groups.block_bytes for name, count in of_a_sequence.items()},
            "blocks": blocks,
            "blocks_per_longest_sequence": self._needed(length),
            "bytes_per_longest_sequence": self._needed(length) * groups.block_bytes,
            "concurrency_at_longest": round(blocks / self._needed(length), 2),
            "tokens": int(blocks / self._needed(length) * length),
        }

    def _official_cache(self, pool: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """vLLM's own layout, of which one measurement is known."""
        tokens = int(pool / OFFICIAL_TOKEN_BYTES)
        length = min(self.longest, self.text["max_position_embeddings"])
        cache = {
            "token_bytes": official_token_bytes(self.model.config),
            "token_bytes_in_blocks": OFFICIAL_TOKEN_BYTES,
            "tokens": tokens,
            "concurrency_at_longest": round(tokens / length, 2),
            "basis": "vLLM's recipe: 38.5 GiB of cache held about 20 million tokens on H200 TP4",
        }
        return cache, {"sequences_at_max_model_len": tokens // length, "limited_by": "the key-value cache"}

    def _graphs(self) -> dict[str, Any]:
        if self.recipe.flag("enforce-eager"):
            return {"sizes": [], "why": "--enforce-eager"}
        mode = self.compilation.get("cudagraph_mode", "the platform's default")
        sizes = self._capture_sizes()
        wanted = self.seqs * (1 + self.draft)
        if max(sizes) < wanted:
            self.notes.append(
                f"decode steps of more than {max(sizes)} tokens run eagerly: {self.seqs} sequences with {self.draft} "
                f"drafts are {wanted}. --max-cudagraph-capture-size {wanted} covers them"
            )
        return {"sizes": sizes, "mode": mode, "largest_step": wanted}

    def _capture_sizes(self) -> list[int]:
        """Of decode graphs; none with --enforce-eager. Raises RecipeError."""
        if self.recipe.flag("enforce-eager"):
            return []
        own = self.compilation.get("cudagraph_capture_sizes")
        if own is not None:
            if not isinstance(own, list) or not own or not all(type(size) is int and size > 0 for size in own):
                raise RecipeError(
                    f"recipe {self.recipe.name}: compilation-config, cudagraph_capture_sizes is {own!r}, expected sizes"
                )
            return sorted(own)
        return devices.capture_sizes(self.seqs, self.draft, self._largest_capture())

    def _largest_capture(self) -> int:
        """Tokens of the largest graph that is asked for."""
        if "max-cudagraph-capture-size" in self.recipe.flags:
            return self.recipe.count("max-cudagraph-capture-size", 1)
        own = self.compilation.get("max_cudagraph_capture_size")
        sizes = self.compilation.get("cudagraph_capture_sizes")
        return int(own or (max(sizes) if sizes else min(self.seqs * (1 + self.draft), devices.CAPTURED)))

    def _exchange(self) -> dict[str, Any]:
        if self.recipe.device != "npu" or not self.expert:
            return {}
        largest = self._largest_capture() if self._capture_sizes() else self.seqs * (1 + self.draft)
        tokens = devices.mc2_tokens(largest, self.tensor)
        ranks = self.tensor * self.data
        need = devices.mc2_buffer(
            self.recipe.hardware,
            tokens,
            self.text["hidden_size"],
            self.text["n_routed_experts"],
            self.text["num_experts_per_tok"],
            ranks,
        )
        if need > self.buffsize:
            self.problems.append(
                f"HCCL_BUFFSIZE {self.buffsize}: the exchange of {tokens} tokens a rank among {ranks} asks for "
                f"{need} MB; "
                f"--set HCCL_BUFFSIZE={-(-need // 64) * 64}"
            )
        return {
            "experts_per_rank": self.text["n_routed_experts"] / ranks,
            "mc2_tokens_per_rank": tokens,
            "hccl_buffsize_needed": need,
            "hccl_buffsize": self.buffsize,
        }

    def _limits(self, blocks: int, used: int) -> dict[str, Any]:
        most = self.text["max_position_embeddings"]
        contexts = [length for length in CONTEXTS if length <= most] or [most]
        sequences = {length: blocks // self._needed(length) for length in contexts}
        longest = _largest(lambda n: self._needed(n * self.caches.block_size) <= blocks, most // self.caches.block_size)
        length = min(self.longest, most)
        fit = blocks // self._needed(length)
        limited = "--max-num-seqs" if self.seqs <= fit else "the key-value cache"
        return {
            "sequences_at_context": sequences,
            "longest_sequence": longest * self.caches.block_size,
            "sequences_at_max_model_len": fit,
            "limited_by": limited,
            "largest_max_num_batched_tokens": self._largest_budget(length, used),
        }

    def _largest_budget(self, length: int, used: int) -> int | None:
        """Largest --max-num-batched-tokens that still leaves a cache for one longest sequence."""
        if self.recipe.device == "cpu" or self.recipe.flag("kv-cache-memory-bytes"):
            return None
        now = activations(
            self.text, self.recipe.hardware, self.budget, self.seqs, self.draft, self.tensor, self.data, self.expert
        ).peak

        def fits(step: int) -> bool:
            budget = step * 512
            work = activations(
                self.text, self.recipe.hardware, budget, self.seqs, self.draft, self.tensor, self.data, self.expert
            )
            left = int(self.share * self.usable) - used + now - work.peak
            return left // self.caches.groups.block_bytes >= self._needed(length, budget)

        return _largest(fits, 64) * 512

    def _problems(self, headroom: int, blocks: int, used: int) -> None:
        needed, length = self._needed(self.longest), self.longest
        most = self.text["max_position_embeddings"]
        if length > most:
            self.problems.append(f"--max-model-len {length}: the model ends at {most} positions")
            return
        if self.recipe.device == "cpu":
            if blocks < needed:
                self.problems.append(
                    f"the cache holds {blocks} blocks and one sequence of {length} tokens needs {needed}; raise "
                    "VLLM_CPU_KVCACHE_SPACE"
                )
            if headroom < 0:
                self.problems.append(
                    f"a rank needs {-headroom / GIB:.1f} GiB more than device_memory_gib; recipes of CPUs are for tiny "
                    "checkpoints: name one with --model"
                )
            return
        if used > self.share * self.usable:
            over = used - self.share * self.usable
            self.problems.append(
                f"weights and activations need {over / GIB:.1f} GiB more than {self.share:.2f} of a device: "
                + (
                    "move the Engram tables to host memory (--engram-config '{\"cpu_offload\":true}'), "
                    if not self.offload
                    else ""
                )
                + "divide the model among more devices, or lower --max-num-batched-tokens"
            )
        elif self.recipe.checkpoint != "official" and blocks < needed:
            fit = _largest(
                lambda n: self._needed(n * self.caches.block_size) <= blocks, length // self.caches.block_size
            )
            self.problems.append(
                f"the cache holds {blocks} blocks and one sequence of {length} tokens needs {needed}: vLLM refuses to "
                f"start; --max-model-len {fit * self.caches.block_size} fits"
                + (
                    ""
                    if self.recipe.flag("kv-cache-memory-bytes") is None
                    else f", or --kv-cache-memory-bytes {needed * self.caches.groups.block_bytes}"
                )
            )
        if headroom < 0 and not self.problems:
            self.problems.append(
                f"graphs and context need {-headroom / GIB:.2f} GiB more than --gpu-memory-utilization "
                f"{self.share:.2f} leaves; "
                f"use {max(self.share - (-headroom + GIB) / self.usable, 0.1):.2f}"
            )
        elif self.recipe.flag("kv-cache-memory-bytes") and headroom > 4 * GIB:
            more = self.recipe.count("kv-cache-memory-bytes", 0) + (headroom - 2 * GIB) // GIB * GIB
            self.notes.append(
                f"{headroom / GIB:.1f} GiB stay free; --kv-cache-memory-bytes {more} would hold "
                f"{more // self.caches.groups.block_bytes // needed} sequences of {length} tokens"
            )
        elif 0 <= headroom < GIB:
            self.notes.append(
                f"headroom is {headroom / MIB:.0f} MiB: long prefill was seen to become 6 to 7 times slower with "
                "so little "
                "(0.94 utilisation); lower --gpu-memory-utilization"
            )


def _share(recipe: Recipe) -> float:
    """--gpu-memory-utilization. Raises RecipeError."""
    value = recipe.flag("gpu-memory-utilization", 0.92)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise RecipeError(f"recipe {recipe.name}: gpu-memory-utilization is {value!r}, expected a number up to 1")
    return float(value)


def _object(recipe: Recipe, name: str) -> dict[str, Any]:
    """A flag that is a JSON object. Raises RecipeError."""
    value = recipe.flag(name, {})
    if not isinstance(value, dict):
        raise RecipeError(f"recipe {recipe.name}: {name} is {value!r}, expected a JSON object")
    return value


def _largest(good: Any, most: int) -> int:
    """The largest n up to ``most`` for which ``good(n)``, which holds up to some n; 0 if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if good(middle) else (low, middle - 1)
    return low


def plan(recipe: Recipe, model_path: Path | None = None) -> MemoryPlan:
    """Memory of a recipe, with a checkpoint's own sizes or the released ones. Raises CheckpointError, ConfigError."""
    model = Model.of(model_path, recipe.checkpoint)
    found = _Planner(recipe, model).plan()
    if model_path is None:
        found.published = _published()
    return found
