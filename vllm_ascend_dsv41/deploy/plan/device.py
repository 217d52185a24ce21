"""What of a device's memory is not there for a model: numbers that others measured, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """Memory facts of a kind of device. Bytes."""

    reserved: int
    reserved_basis: str
    context: int
    context_basis: str
    graphs: int
    graphs_basis: str
    other: int
    other_basis: str


NPU = Device(
    reserved=3113 * MIB,
    reserved_basis="of 64 GiB torch_npu saw 60.96 (vllm-ascend#4404, #2378)",
    context=420 * MIB,
    context_basis="60.55 of 60.96 GiB free before the model (vllm-ascend#11514, #13439)",
    graphs=820 * MIB,
    graphs_basis="0.78 GiB for all decode graphs of V4-Flash W8A8 (vllm-ascend#13439); not measured for V4.1",
    other=230 * MIB,
    other_basis="0.22 GiB beside PyTorch after profiling V4-Flash (vllm-ascend#13439)",
)
GPU = Device(
    reserved=0,
    reserved_basis="the recipe's device_memory_gib is what the driver shows",
    context=600 * MIB,
    context_basis="a CUDA or ROCm context; not measured here",
    graphs=1024 * MIB,
    graphs_basis="a guess; not measured here",
    other=1024 * MIB,
    other_basis="NCCL and workspaces, a guess; not measured here",
)
CPU = Device(0, "none", 0, "none", 0, "none", 0, "none")


def of(kind: str) -> Device:
    """Facts of a recipe's ``device``."""
    return {"npu": NPU, "cpu": CPU}.get(kind, GPU)


@dataclass(frozen=True)
class Hccl:
    """Buffers of HCCL communicators as vllm-ascend 0.30.0rc2 makes them. MB are 2**20 bytes, as HCCL counts."""

    groups: tuple[tuple[str, int], ...]
    """Name, MB of one direction: a communicator takes it twice (CANN, HCCL_BUFFSIZE)."""

    @property
    def bytes(self) -> int:
        """Of all communicators of a rank."""
        return sum(2 * size for _, size in self.groups) * MIB


def hccl(tensor: int, data: int, expert: bool, buffsize: int) -> Hccl:
    """Communicators of a rank: vllm-ascend gives 200 MB to each group and 50 to data parallelism, whatever
    HCCL_BUFFSIZE says; the exchange of experts' tokens (MC2) has one of its own of HCCL_BUFFSIZE. (Its ``utils.py``
    and its patch of ``distributed``; groups of equal ranks are one communicator.)"""
    groups = []
    if tensor * data > 1:
        groups.append(("world", 200))
    if tensor > 1 and data > 1:
        groups.append(("tensor parallel", 200))
    if data > 1:
        groups.append(("data parallel", 50))
    if expert and tensor * data > 1:
        groups.append(("MC2", buffsize))
    return Hccl(tuple(groups))


def mc2_tokens(largest_step: int, tensor: int) -> int:
    """Tokens per rank that MC2 is dimensioned for: the largest captured step, or without graphs a decode step of all
    sequences, divided among tensor-parallel ranks; at most 512 (vllm-ascend 0.30.0rc2, ``ascend_forward_context``)."""
    return min(-(-largest_step // tensor), 512)


def mc2_buffer(hardware: str, tokens: int, hidden: int, experts: int, chosen: int, ranks: int) -> int:
    """HCCL_BUFFSIZE in MB that ``npu_moe_distribute_dispatch`` and ``combine`` ask for; the largest of the algorithms
    that may be chosen without being asked for. ``tokens``: per rank; ``ranks``: that experts are divided among.

    Source: CANN's tiling code of both operators (A3: fullmesh and fullmesh_v2; A2: fullmesh).
    """
    local = -(-experts // ranks)
    if "A2" in hardware:
        return -(-2 * (tokens * ranks * min(local, chosen) * hidden * 2 + 2 * MIB) // MIB)
    row = _up(2 * hidden, 32) + 44
    combine = tokens * _up(2 * hidden, 512) * (chosen + 1)  # and one shared expert
    dispatch = max(_up(row, 512), -(-row // 480) * 512)
    return -(-2 * (tokens * dispatch * ranks * local + combine) // MIB)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


CAPTURED = 512  # tokens of the largest graph where nobody says another


def capture_sizes(max_num_seqs: int, draft_tokens: int, largest: int | None = None) -> list[int]:
    """Sizes of decode graphs in tokens, by the defaults of vLLM 0.30.0 and vllm-ascend: up to ``largest`` (512), each a
    whole number of requests with their drafts."""
    per_request = 1 + draft_tokens
    largest = largest or min(max_num_seqs * per_request, CAPTURED)
    plain = [1, 2, 4, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)]
    rounded = {_up(size, per_request) for size in [*plain, largest] if size <= largest}
    return sorted(size for size in rounded if size <= max(largest, per_request))
