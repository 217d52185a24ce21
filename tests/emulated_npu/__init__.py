"""An Ascend NPU that exists only in software: the real torch_npu and vllm-ascend run on it. See README.md."""

from __future__ import annotations


def install() -> None:
    """Gives the fake device its numerics. Needs the environment that `setup` prepares."""
    import torch
    import torch_npu  # noqa: F401  (registers the device)

    from . import aclnn, atb, aten, graphs, library

    aclnn.load()
    library.set_hooks(graphs.graph_hook, aclnn.hook)
    torch.npu.set_compile_mode(
        jit_compile=False
    )  # otherwise torch_npu takes the older aclop path, which has no references
    torch.empty(1, device="npu")  # the device must be initialised before its kernels are replaced
    aten.install()
    atb.install()
