"""Imported by `sitecustomize` in every process of the emulated environment, workers and vLLM's inspectors included:
puts the stand-ins in place and gives the device its numerics when torch_npu initialises it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Modules that a file here stands for.
FILES = {
    "triton.language.extra.cann": HERE / "shims/cann_extension/__init__.py",
    "triton.language.extra.cann.libdevice": HERE / "shims/cann_extension/libdevice.py",
    "triton.language.extra.cann.extension": HERE / "shims/cann_extension/extension.py",
    "vllm_ascend.vllm_ascend_C": HERE / "c_ascend/extension.py",
}
#: Packages of which vllm-ascend imports names that its V4.1 path never calls.
ABSENT = {"fla_npu"}


class _Absent(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_arguments: object, **_keywords: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is not part of the emulated NPU")

        return missing


def _torchvision_schemas() -> None:
    """torchvision from PyPI is linked against CUDA: its C++ operators are absent, and two registrations need them."""
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _numerics(_module: types.ModuleType) -> None:
    import torch

    from . import install

    torch.npu._lazy_call(install)


def _triton(module: types.ModuleType) -> None:
    from . import triton_interpreter

    triton_interpreter.install(module)


#: What to do right after the import of a module.
AFTER: dict[str, Callable[[types.ModuleType], None]] = {"torch_npu": _numerics, "triton.runtime.interpreter": _triton}


class _Then(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, then: Callable[[types.ModuleType], None]) -> None:
        self.loader, self.then = loader, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self.loader.exec_module(module)
        self.then(module)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            _torchvision_schemas()
        if name in FILES:
            folder = [str(FILES[name].parent)] if FILES[name].name == "__init__.py" else None
            return importlib.util.spec_from_file_location(name, FILES[name], submodule_search_locations=folder)
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name in AFTER:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = _Then(spec.loader, AFTER[name])
            return spec
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


if not any(isinstance(f, Finder) for f in sys.meta_path):
    sys.meta_path.insert(0, Finder())
