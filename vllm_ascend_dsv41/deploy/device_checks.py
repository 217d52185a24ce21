"""What serving needs of a device beside its operators, each tried once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import ops


@dataclass(frozen=True)
class Check:
    """``found``: what was seen, with numbers."""

    name: str
    passed: bool
    found: str


def prepare(device_type: str) -> None:
    """Load what the adapters of a device call. Raises ImportError, RuntimeError."""
    if device_type != "npu":
        return
    import torch_npu

    from ..upstream import enable_custom_op

    torch_npu.npu.config.allow_internal_format = True  # as vllm-ascend's worker; weights stay row-major otherwise
    if not enable_custom_op():
        raise RuntimeError("vllm-ascend's extension could not be loaded; is vllm-ascend built for this chip?")


def _formats(device: str) -> Check:
    import torch_npu

    from ..ops.npu.linear import NZ, to_nz

    found = torch_npu.get_npu_format(to_nz(torch.ones(64, 128, dtype=torch.int8, device=device)))
    return Check("INT8 weights in FRACTAL_NZ", found == NZ, f"format {int(found)}, expected {NZ}")


def _graph(device: str) -> Check:
    """A graph over persistent inputs, captured once and replayed with other data, against eager calls."""
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(6, 4, 256, generator=generator).bfloat16().to(device)
    pre = torch.rand(6, 4, generator=generator).to(device)
    fn, base = (torch.randn(*shape, generator=generator).to(device) * 0.1 for shape in ((24, 1024), (24,)))
    scale, weight = torch.ones(3, device=device), torch.ones(256, device=device)

    def step() -> torch.Tensor:
        x, _, post, comb = ops.hc_pre(streams, pre, fn, scale, base, 20, 1e-6, 1e-20)
        return ops.hc_expand(ops.rms_norm(x, weight, 1e-20), streams, post, comb)

    step()  # kernels are loaded outside of the capture
    npu: Any = torch.get_device_module("npu")
    graph = npu.NPUGraph()
    with npu.graph(graph):
        captured = step()
    worst = 0.0
    for _ in range(3):
        streams.copy_(torch.randn(6, 4, 256, generator=generator).bfloat16())
        graph.replay()
        npu.synchronize()
        worst = max(worst, float((captured.float() - step().float()).abs().max()))
    return Check("a captured graph, replayed with other data", worst == 0.0, f"largest deviation from eager {worst:g}")


def _host_memory(device: str) -> Check:
    """Engram rows in host memory that the device reads: the probe that every server makes before it loads tables."""
    from ..engram import Acl
    from ..engram.probe import private_memory, probe

    try:
        acl = Acl()
        probe(acl, torch.device(device), lambda size, block: private_memory(size, block, acl))
    except (OSError, RuntimeError, ValueError) as error:
        return Check("the device reads registered host memory", False, str(error).splitlines()[0])
    return Check("the device reads registered host memory", True, "2 MiB, a row of every page")


def _index_weights(device: str) -> Check:
    """The indexer multiplies FP16 weights by FP16 query scales: of ordinary activations nothing may become 0, and what
    does must be seen here."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(64, 32, 128, generator=generator).bfloat16().to(device)
    weights = torch.randn(64, 32, generator=generator).to(device) * (128 * 32) ** -0.5
    ordinary, tiny = ops.underflows(q, weights), ops.underflows(q * 2**-10, weights * 2**-10)
    found = (
        f"{ordinary} of {weights.numel()} products of ordinary size became 0, {tiny} of those a million times smaller"
    )
    return Check("FP16 index weights times query scales", ordinary == 0 and tiny > 0, found)


def _exchange(device: str, ranks: int) -> Check:
    """Collectives of as many processes as there are devices, or ``ranks``."""
    from .collectives import run

    return Check(NAMES[_exchange], True, run(torch.device(device).type, ranks))


def _model(device: str, ranks: int) -> Check:
    """A tiny model, converted, served and compared with the reference."""
    from .demo import EQUAL_SHARE, NEAR_TIE, compare_with_reference
    from .members import MemberError, scratch
    from .tiny_run import PROMPTS, served

    del ranks
    with scratch() as directory:
        checkpoint, tokens = served(torch.device(device).type, directory)
        compared = [compare_with_reference(checkpoint, p, t) for p, t in zip(PROMPTS, tokens, strict=True)]
        equal, total = sum(c.equal for c in compared), sum(c.total for c in compared)
        gap = max(c.worst_gap for c in compared)
        found = f"{equal} of {total} greedy tokens are the reference's, the others within {gap:.2f} of its best logit"
        if gap > NEAR_TIE or equal < EQUAL_SHARE * total:
            raise MemberError(f"{found}; checkpoint and log: {directory}")
    return Check(NAMES[_model], True, found)


def tried(check: Callable[..., Check], *arguments: Any) -> Check:
    """The check's result. Whatever it dies of is its result, too: others must not be lost with it."""
    try:
        return check(*arguments)
    except Exception as error:
        said = str(error).strip().splitlines() or ["no message"]
        return Check(NAMES[check], False, f"{type(error).__name__}: {said[0]}")


CHECKS: dict[str, tuple[Callable[[str], Check], ...]] = {"npu": (_formats, _graph, _index_weights, _host_memory)}
#: These start processes, and take minutes.
SYSTEM_CHECKS: tuple[Callable[[str, int], Check], ...] = (_exchange, _model)
NAMES: dict[Callable[..., Check], str] = {
    _formats: "INT8 weights in FRACTAL_NZ",
    _graph: "a captured graph, replayed with other data",
    _index_weights: "FP16 index weights times query scales",
    _host_memory: "the device reads registered host memory",
    _exchange: "collectives",
    _model: "a tiny model, served",
}
