"""Lowers one Triton kernel to linalg; run by ascend_compiler.py, with Triton-Ascend before the environment's Triton."""

from __future__ import annotations

import importlib.util
import json
import sys

from triton._C.libtriton import ir
from triton.backends.ascend import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

job = json.loads(sys.argv[1])
spec = importlib.util.spec_from_file_location("kernels", job["source"])
kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)

target = GPUTarget("npu", job["soc"], 0)
backend = compiler.AscendBackend(target)
options = backend.parse_options({})
source = ASTSource(fn=getattr(kernels, job["kernel"]), signature=job["signature"], constants=job["constants"])
context = ir.context()
ir.load_dialects(context)
backend.load_dialects(context)
module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
metadata = {**options.__dict__, "target": target}
module = compiler.make_ttir(module, metadata, options)
print(compiler.ttir_to_linalg(module, metadata, options, named_ops=True))
