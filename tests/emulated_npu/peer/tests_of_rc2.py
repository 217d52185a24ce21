"""Functions out of vllm-ascend 0.30.0rc2's own tests, without importing the modules around them (which need an NPU)."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

OPS = "e2e/nightly/single_node/ops/singlecard_ops/"


def _root() -> Path:
    return Path(os.environ["EMULATED_NPU"]) / "vllm_ascend_tests"


def functions(path: str, **names: Any) -> SimpleNamespace:
    """All plain functions and constants of a test module; `names` are what its imports would have brought."""
    tree = ast.parse((_root() / path).read_text())
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("test_"):
            node.decorator_list = []
            kept.append(node)
        elif (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, (ast.Constant, ast.BinOp))
        ):
            kept.append(node)
    space: dict[str, Any] = {"torch": torch, "np": np, "F": torch.nn.functional, **names}
    module = ast.fix_missing_locations(ast.Module(body=list(kept), type_ignores=[]))
    exec(compile(module, path, "exec", flags=0x1000000), space)  # annotations stay text: their names are not imported
    return SimpleNamespace(**{k: v for k, v in space.items() if not k.startswith("__")})


def indexer_golden() -> ModuleType:
    """The CPU golden of the quantised lightning indexer (csrc/attention/quant_lightning_indexer_v2/tests)."""
    import sys

    folder = _root() / "quant_lightning_indexer"
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(
        "quant_lightning_indexer_v2_golden", folder / "quant_lightning_indexer_v2_golden.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
