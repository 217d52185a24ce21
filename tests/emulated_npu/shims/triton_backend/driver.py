from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class _Properties:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"num_aicore": 20, "num_vectorcore": 40, "max_shared_mem": 192 * 1024}  # Ascend 910B3


class EmulatedDriver(DriverBase):
    utils = _Properties()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("npu", "Ascend910B3", 0)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("npu", torch.npu.current_device())

    def get_current_device(self) -> int:
        return int(torch.npu.current_device())

    def get_device_interface(self) -> Any:
        return torch.npu

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("times of interpreted kernels mean nothing")
