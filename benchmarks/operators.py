"""Alternatives for the CPU operators that matter, timed: why ``ops`` does what it does.

python benchmarks/operators.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from vllm_ascend_dsv41.ops.integer_product import integer_product
from vllm_ascend_dsv41.ops.mx import E2M1


def milliseconds(call: Callable[[], object], seconds: float = 0.5) -> float:
    """Mean time of a call, after two for warming up."""
    call(), call()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        count += 1
    return (time.perf_counter() - start) / count * 1e3


def show(title: str, **calls: Callable[[], object]) -> None:
    """One line per group of alternatives."""
    print(
        f"{title:34} " + "   ".join(f"{name} {milliseconds(call):8.3f} ms" for name, call in calls.items()), flush=True
    )


def int8_products() -> None:
    """INT8 weights [3072, 1024] times INT8 activations."""
    weight = torch.randint(-127, 128, (3072, 1024), dtype=torch.int8)
    for rows in (1, 2, 4, 8, 16, 256):
        codes = torch.randint(-127, 128, (rows, 1024), dtype=torch.int8)
        out = torch.empty(rows, 3072)
        show(
            f"INT8 product, {rows} rows",
            convert_and_gemm=lambda codes=codes: codes.float() @ weight.float().T,
            numba=lambda codes=codes, out=out: integer_product(codes.numpy(), weight.numpy(), out.numpy()),
            int_mm=lambda codes=codes: torch._int_mm(codes, weight.T),
        )


def bf16_products() -> None:
    """BF16 weights [4096, 1024] times BF16 activations."""
    weight = torch.randn(4096, 1024).bfloat16()
    for rows in (1, 2, 4, 16, 256):
        x = torch.randn(rows, 1024).bfloat16()
        show(
            f"BF16 linear, {rows} rows",
            bf16_gemm=lambda x=x: torch.nn.functional.linear(x, weight),
            convert_and_gemm=lambda x=x: (x.float() @ weight.float().T).bfloat16(),
        )


def hyper_connections() -> None:
    """512 tokens, 4 streams of 1024."""
    y, x = torch.randn(512, 1024).bfloat16(), torch.randn(512, 4, 1024).bfloat16()
    post, comb = torch.rand(512, 4), torch.rand(512, 4, 4)

    def as_one_product() -> torch.Tensor:
        inputs = torch.cat((x, y[:, None]), dim=1).float()
        return torch.bmm(torch.cat((comb, post[:, None]), dim=1).transpose(1, 2), inputs).bfloat16()

    def add_then_product() -> torch.Tensor:
        added = post[..., None] * y.float()[:, None]
        return torch.baddbmm(added, comb.transpose(1, 2), x.float()).bfloat16()

    show("hc_expand, 512 tokens", as_one_product=as_one_product, add_then_product=add_then_product)


def fp4() -> None:
    """Packed FP4 [1536, 512] bytes to float32."""
    byte = torch.randint(0, 256, (1536, 512), dtype=torch.uint8)
    value = torch.tensor([*E2M1, *(-v for v in E2M1)])
    pairs = torch.stack((value[torch.arange(256) & 15], value[torch.arange(256) >> 4]), dim=1).view(torch.int64)[:, 0]
    show(
        "FP4 decoding, 0.8 MB",
        two_nibbles=lambda: value[torch.stack((byte & 15, byte >> 4), dim=-1).flatten(-2).long()],
        byte_table=lambda: pairs.index_select(0, byte.flatten().int()).view(torch.float32),
    )


if __name__ == "__main__":
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    int8_products()
    bf16_products()
    hyper_connections()
    fp4()
