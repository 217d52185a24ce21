"""How Engram tables are kept: vLLM's --engram-config, and what only this package asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MOST_THREADS = 64
#: Of --additional-config '{"dsv41": {"engram": {...}}}'.
OWN = ("chunk_mib", "numa", "prefetch", "load_threads", "use_thp")


class EngramOptionError(ValueError):
    """An option or a combination of options that cannot be honoured, with the reason and the remedy."""


@dataclass(frozen=True)
class EngramOptions:
    """The first three are fields of vLLM's EngramConfig; the others come from --additional-config."""

    cpu_offload: bool = True
    """Tables in host memory, which the device reads; false: in device memory."""
    embedding_across_dp: bool = False
    """Divide the hash columns among tensor-parallel ranks and data-parallel ranks of a node."""
    dp_shared_memory: bool = False
    """Data-parallel ranks of a node share one copy of each tensor-parallel shard."""
    use_thp: bool = False
    """Transparent huge pages for a private copy: fewer misses of the address cache at random rows."""
    chunk_mib: int = 1024
    """Largest range that is registered at once, in MiB; larger ones are cut. Drivers refused 200 GB in one.
    A chunk holds whole huge pages of codes and of scales: 16 MiB at least, with the released rows."""
    numa: str = "auto"
    """``auto``: the node of the device, or all nodes in turn for a shared copy; ``interleave``; ``off``: as
    the process allocates; or node numbers: ``0,2``."""
    prefetch: bool = False
    """Look rows up on a second stream (on CPU: a thread) while the layers before them compute."""
    load_threads: int = 2
    """Threads of a rank that read its tables; there are other ranks."""

    @classmethod
    def of(cls, engram_config: Any, additional_config: Mapping[str, Any] | None) -> EngramOptions:
        """From vLLM's two options; ``engram_config`` None: its defaults. Raises EngramOptionError."""
        where = "--additional-config, dsv41"
        kept = getattr(engram_config, "own", {})  # where a platform refuses keys of ours beside its own
        outer = (additional_config or {}).get("dsv41", kept)
        if not isinstance(outer, Mapping) or set(outer) - {"engram"}:
            raise EngramOptionError(f'{where} is {outer!r}, expected an object with "engram" and nothing else')
        where, own = f"{where}.engram", outer.get("engram", {})
        if not isinstance(own, Mapping):
            raise EngramOptionError(f"{where}: {own!r} is not an object")
        values = {name: getattr(engram_config, name) for name in _names() if hasattr(engram_config, name)}
        for key, value in own.items():
            if key not in OWN:
                hint = "it belongs to --engram-config" if key in _names() else f"there are {', '.join(OWN)}"
                raise EngramOptionError(f"{where}: unknown option {key!r}; {hint}")
            if key == "numa" and type(value) is int:  # vLLM's --additional-config.dsv41.engram.numa 0
                value = str(value)
            wanted = type(getattr(cls, key))
            if type(value) is not wanted:
                raise EngramOptionError(f"{where}: {key} is {value!r}, expected {wanted.__name__}")
            values[key] = value
        options = cls(**values)
        options._check(where)
        return options

    def _check(self, where: str) -> None:
        for name in ("chunk_mib", "load_threads"):
            if getattr(self, name) < 1:
                raise EngramOptionError(f"{where}: {name} is {getattr(self, name)}, expected at least 1")
        if self.load_threads > MOST_THREADS:
            raise EngramOptionError(f"{where}: load_threads is {self.load_threads}, expected at most {MOST_THREADS}")
        if self.chunk_mib % 2:
            raise EngramOptionError(f"{where}: chunk_mib is {self.chunk_mib}, expected a multiple of 2 (a huge page)")
        self.nodes  # noqa: B018  it raises where numa is no list
        refused = [
            (
                self.dp_shared_memory and self.embedding_across_dp,
                "dp_shared_memory and embedding_across_dp exclude each other: a table is either shared between "
                "data-parallel ranks or divided among them; sharing needs no exchange in every step",
            ),
            (
                self.dp_shared_memory and not self.cpu_offload,  # upstream refuses it too; here rows would stay zero
                "dp_shared_memory is about host memory, and cpu_offload is false; leave one of them out",
            ),
            (
                self.dp_shared_memory and self.use_thp,
                "use_thp is for a private copy: huge pages of shared memory are the kernel's setting "
                "(/sys/kernel/mm/transparent_hugepage/shmem_enabled); leave one of use_thp and dp_shared_memory out",
            ),
            (
                self.use_thp and not self.cpu_offload,
                "use_thp is about host memory, and cpu_offload is false; leave one of them out",
            ),
        ]
        for condition, text in refused:
            if condition:
                raise EngramOptionError(f"--engram-config: {text}")

    @property
    def nodes(self) -> list[int] | None:
        """The nodes that ``numa`` names, None where it is a word. Raises EngramOptionError."""
        if self.numa in ("auto", "interleave", "off"):
            return None
        try:
            return [int(part) for part in self.numa.split(",")]
        except ValueError as error:
            raise EngramOptionError(
                f"numa is {self.numa!r}, expected auto, interleave, off or node numbers such as 0,2"
            ) from error


def _names() -> tuple[str, ...]:
    return tuple(field.name for field in fields(EngramOptions))
