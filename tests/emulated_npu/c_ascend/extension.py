"""Stands for the module `vllm_ascend.vllm_ascend_C`: importing it registers torch.ops._C_ascend."""

import json
import os
from pathlib import Path

import torch

import emulated_npu.c_ascend.attention
import emulated_npu.c_ascend.elementwise
import emulated_npu.c_ascend.hyper_connections
import emulated_npu.c_ascend.indexer
import emulated_npu.c_ascend.moe  # noqa: F401
from emulated_npu.c_ascend import REFERENCES
from emulated_npu.dispatch import kernel

_library = torch.library.Library("_C_ascend", "DEF")
#: These see no tensor, so the dispatcher cannot choose by device.
_ANYWHERE = {
    "get_physical_device_id",
    "get_npu_view_from_cpu_tensor",
    "npu_quant_lightning_indexer_v2_metadata",
    "npu_sparse_flash_mla_metadata",
}

for _schema in json.loads((Path(os.environ["EMULATED_NPU"]) / "c_ascend_schemas.json").read_text()):
    _name = _schema.split("(")[0].strip()
    _library.define(_schema)
    _kernel = kernel("_C_ascend", _name, REFERENCES, writes="!)" in _schema)
    _library.impl(_name, _kernel, "CompositeExplicitAutograd" if _name in _ANYWHERE else "PrivateUse1")
