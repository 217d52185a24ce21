"""PyTorch's own operators on the emulated NPU: every aten kernel of PrivateUse1 that returns no view is replaced by
the CPU kernel on views of the same memory. Views, `empty`, `set_` and pinning stay torch_npu's.

The replacement is registered with the dispatcher, so it serves all threads, and C++ callers as well as Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from . import formats, graphs, memory, recorder
from .library import WAITING, EmulationError

_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
#: torch_npu's own kernels of these only make or describe tensors and run as they are.
OWN = re.compile(
    r"aten::(empty|new_empty|set_|resize|as_strided|_pin_memory|is_pinned|record_stream|is_set_to|view|_reshape_alias|squeeze|unsqueeze"
    r"|unfold|get_storage_size|unsafe_empty|npu_|_to_copy$|contiguous|alias|detach|data_ptr|copy_memory_)"
)
#: These copy between devices, the host among them.
COPIES = {"copy_", "_foreach_copy_", "_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "set_"}
#: These accept indices (their second argument) on the host.
INDEXES = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
#: These bring device memory to the host whatever their arguments.
HOST_READS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
    "equal",
    "is_nonzero",
}
_library: list[torch.library.Library] = []
_captured_draws = [0]


def _histc(x: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
    return torch.ops.aten.histc.default(x.double(), *arguments, **keywords).to(x.dtype)


#: The NPU takes dtypes here that the CPU does not.
SUBSTITUTES: dict[str, Callable[..., Any]] = {"aten::histc": _histc}


def _generator(given: torch.Generator | None, device: torch.device) -> torch.Generator:
    """A CPU generator from the (seed, offset) of an NPU generator, whose offset moves on by one draw."""
    if given is not None and given.device.type == "cpu":
        return given
    source = given if given is not None else torch.npu.default_generators[device.index or 0]
    if graphs.capturing():  # the state cannot be read now; each replay draws on from this generator
        _captured_draws[0] += 1
        return torch.Generator().manual_seed((source.initial_seed() + 7919 * _captured_draws[0]) % (1 << 63))
    state = source.get_state().clone()
    seed_and_offset = state.view(torch.int64)
    generator = torch.Generator()
    generator.manual_seed((int(seed_and_offset[0]) * 1000003 + int(seed_and_offset[1])) % (1 << 63))
    seed_and_offset[1] += 4
    source.set_state(state)
    return generator


class _Call:
    """One call of a kernel: arguments become CPU views, results go back to the device."""

    __slots__ = ("device", "name", "pairs", "strict")

    def __init__(self, name: str, strict: bool) -> None:
        self.name, self.strict = name, strict  # strict: one device, and of the host only numbers
        self.device: torch.device | None = None
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of the CPU view -> (view, NPU tensor)

    def take(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type == "npu":
                if self.device is None:
                    self.device = value.device
                elif value.device != self.device and self.strict:
                    raise EmulationError(f"{self.name}: tensors on {self.device} and {value.device}")
                formats.check_plain(self.name, value)
                view = memory.host(value)
                self.pairs[id(view)] = (view, value)
                return view
            if self.strict and value.dim() > 0 and value.device.type == "cpu":
                raise EmulationError(
                    f"{self.name}: Expected all tensors to be on the same device, but found a CPU tensor of shape "
                    f"{list(value.shape)}"
                )
            return value
        if isinstance(value, torch.device):
            if value.type == "npu":
                self.device = value
                return torch.device("cpu")
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(self.take(v) for v in value)
        return value

    def indices(self, value: Any) -> Any:
        """As `take`, and tensors on the host are allowed."""
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return value
        return type(value)(self.indices(v) for v in value) if isinstance(value, (list, tuple)) else self.take(value)

    def give(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            pair = self.pairs.get(id(value))
            return pair[1] if pair else memory.to_device(value, self.device or current_device())
        if isinstance(value, (list, tuple)):
            return type(value)(self.give(v) for v in value)
        return value


def current_device() -> torch.device:
    return torch.device("npu", torch.npu.current_device())


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _kernel(name: str, schema: torch._C.FunctionSchema) -> Callable[..., Any]:
    base, _, overload = name.removeprefix("aten::").partition(".")
    cpu = SUBSTITUTES.get(name) or getattr(getattr(torch.ops.aten, base), overload or "default")
    outputs = [a.name for a in schema.arguments if a.is_out]
    draws = any(a.name == "generator" for a in schema.arguments)
    strict = base not in COPIES
    writes = next((i for i, a in enumerate(schema.arguments) if a.alias_info is not None and not a.is_out), None)
    reads_host = base in HOST_READS

    def kernel(*arguments: Any, **keywords: Any) -> Any:
        call = _Call(name, strict)
        given = [call.take(a) if not (base in INDEXES and i == 1) else call.indices(a) for i, a in enumerate(arguments)]
        if base in INDEXES and arguments[0].device.type == "cpu":
            raise EmulationError(f"{name}: a CPU tensor with indices on {call.device}")
        out = {k: keywords.pop(k) for k in outputs if k in keywords}
        options = {k: (False if k == "pin_memory" else call.take(v)) for k, v in keywords.items()}
        for k, v in out.items():
            call.take(v)
            options[k] = torch.empty(0, dtype=v.dtype)
        device = call.device or current_device()
        if draws and not any(isinstance(a, torch.Generator) for a in given):
            given_generator: Any = options.get("generator")
            options["generator"] = _generator(given_generator, device)
        elif draws:
            given = [_generator(a, device) if isinstance(a, torch.Generator) else a for a in given]
        if reads_host or (base in ("copy_", "_copy_from") and _brings_to_host(base, arguments, keywords)):
            graphs.check_host_read()
        if WAITING.value:
            graphs.check_launch(torch.npu.current_stream().npu_stream)
        if recorder.active():
            recorder.note("aten", name, arguments, {**keywords, **out})
        if graphs.state.update is not None and (out or writes is not None):  # an update of a task group runs nothing
            targets = {k: memory.host(v) for k, v in out.items()}
            run = _filler(cpu, given, options, targets) if out else lambda: cpu(*given, **options)
            graphs.record(name, run, *_tensors(given), *targets.values())
            return next(iter(out.values())) if out else arguments[writes or 0]
        result = cpu(*given, **options)
        if out:
            return _fill(name, cpu, given, options, out)
        returned = call.give(result)
        if graphs.state.capture is not None or graphs.state.update is not None:
            _record(cpu, given, options, call, result, returned)
        return returned

    return kernel


def _brings_to_host(base: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    target, source = arguments[:2] if base == "copy_" else (arguments[1], arguments[0])
    non_blocking = arguments[2] if len(arguments) > 2 else keywords.get("non_blocking", False)
    return target.device.type == "cpu" and source.device.type == "npu" and not non_blocking


def _filler(
    cpu: Callable[..., Any], given: list[Any], options: dict[str, Any], targets: dict[str, torch.Tensor]
) -> graphs.Kernel:
    def run() -> None:
        fresh = {**options, **{k: torch.empty(0, dtype=t.dtype) for k, t in targets.items()}}
        cpu(*given, **fresh)
        for k, target in targets.items():
            target.copy_(fresh[k])

    return run


def _fill(
    name: str, cpu: Callable[..., Any], given: list[Any], options: dict[str, Any], out: dict[str, torch.Tensor]
) -> Any:
    """`out=` tensors take the shape of the result; they may alias an input, so the result is computed beside them."""
    for k, tensor in out.items():
        if tensor.shape != options[k].shape:
            tensor.resize_(options[k].shape)
        memory.host(tensor).copy_(options[k])
    if graphs.capturing():
        targets = {k: memory.host(t) for k, t in out.items()}
        graphs.record(name, _filler(cpu, given, options, targets), *_tensors(given), *targets.values())
    values = tuple(out.values())
    return values[0] if len(values) == 1 else values


def _record(
    cpu: Callable[..., Any], given: list[Any], options: dict[str, Any], call: _Call, result: Any, returned: Any
) -> None:
    fresh = [
        (i, memory.host(t))
        for i, (r, t) in enumerate(zip(_tensors(result), _tensors(returned), strict=True))
        if id(r) not in call.pairs
    ]

    def again() -> None:
        computed = _tensors(cpu(*given, **options))
        for i, target in fresh:
            target.copy_(computed[i])

    graphs.record(call.name, again, *_tensors(given), *_tensors(list(options.values())), *(t for _, t in fresh))


def _poisoned(name: str) -> Callable[..., Any]:
    """torch_npu's own `empty`, whose memory then holds NaN: a reader of memory that nobody wrote shows."""
    own = torch.library.get_kernel(name, "PrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

    def kernel(*arguments: Any, **keywords: Any) -> torch.Tensor:
        tensor: torch.Tensor = own.call_boxed(keys, *arguments, **keywords)
        if tensor.device.type == "npu" and tensor.numel() and not graphs.capturing():
            storage = tensor.untyped_storage()
            whole = memory.view(storage.data_ptr(), torch.uint8, (storage.nbytes(),), (1,), tensor.device.index)
            whole.fill_(0xFF)
        return tensor

    return kernel


def install() -> int:
    """Registers the kernels; returns how many."""
    library = torch.library.Library("aten", "IMPL")
    _library.append(library)
    for name in ("empty.memory_format", "empty_strided"):
        library.impl(name, _poisoned("aten::" + name), "PrivateUse1", allow_override=True)
    count = 0
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or OWN.match(name):
            continue
        ours = _has_kernel(name, "PrivateUse1")
        if not (
            _has_kernel(name, "CPU")
            or (
                ours
                and (_has_kernel(name, "CompositeExplicitAutograd") or _has_kernel(name, "CompositeImplicitAutograd"))
            )
        ):
            continue  # a composite that torch_npu leaves alone decomposes by itself
        base, _, overload = name.partition(".")
        try:
            schema = torch._C._get_schema(base, overload)
        except RuntimeError:
            continue
        if any(a.alias_info is not None and not a.alias_info.is_write for a in [*schema.arguments, *schema.returns]):
            continue
        library.impl(name.removeprefix("aten::"), _kernel(name, schema), "PrivateUse1", allow_override=True)
        count += 1
    # The choice of an attention kernel is asked before any runs: 0 is the one made of matrix products.
    library.impl("_fused_sdp_choice", lambda *a, **k: 0, "PrivateUse1", allow_override=True)
    return count
