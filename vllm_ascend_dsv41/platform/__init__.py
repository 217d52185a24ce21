"""Which platform class rules this process."""

from __future__ import annotations

import logging
from importlib.metadata import entry_points
from importlib.util import find_spec

logger = logging.getLogger("vllm.dsv41")

CPU = "vllm_ascend_dsv41.platform.cpu.CpuPlatform"
NPU = "vllm_ascend_dsv41.platform.npu.NpuPlatform"


def _other_platform_plugins() -> list[str]:
    """Out-of-tree platforms beside ours that vLLM would activate: it allows one."""
    import os

    allowed = os.environ.get("VLLM_PLUGINS")
    names = [entry.name for entry in entry_points(group="vllm.platform_plugins") if entry.name != "dsv41"]
    return names if allowed is None else [name for name in names if name in allowed.split(",")]


def _npu_stack() -> bool:
    """Whether the software for NPUs is installed."""
    return find_spec("torch_npu") is not None and find_spec("vllm_ascend") is not None


def _sees_npu() -> bool:
    """Whether torch_npu can be used and sees a device. Initialises none."""
    try:
        import torch_npu

        found = int(torch_npu.npu.device_count())
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("dsv41: torch_npu cannot be used (%s); is CANN's set_env.sh sourced?", error)
        return False
    if not found:
        logger.warning(
            "dsv41: torch_npu sees no device; are driver, /dev/davinci* and ASCEND_RT_VISIBLE_DEVICES as they must be?"
        )
    return found > 0


def select() -> str | None:
    """Class of the platform, or None to stand aside: on CUDA and ROCm, beside another plugin, and where software for
    NPUs is installed but sees none."""
    import torch

    npu = _npu_stack() and _sees_npu()
    # an x86_64 host of NPUs may have PyTorch's CUDA build: the device decides before the build does
    if not npu and (torch.version.cuda is not None or torch.version.hip is not None):
        return None  # vLLM's own platform and kernels serve there
    if _npu_stack() and not npu:
        return None  # a server for NPUs that sees none: the model must not begin to load on its CPUs
    others = _other_platform_plugins()
    if others:
        logger.warning(
            "dsv41 stands aside: vLLM allows one platform plugin and %s is installed too. Set VLLM_PLUGINS=dsv41, or "
            "start with `dsv41 serve`",
            ", ".join(others),
        )
        return None
    return NPU if npu else CPU
