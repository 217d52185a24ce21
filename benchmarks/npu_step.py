"""Device operators per step of our path on the emulated NPU, by layer and kind, and the memory-bound floor of a step.

    .venv/bin/python benchmarks/npu_step.py --work DIR

A checkpoint with the released plan of layers (40, sources, Engram, three draft stages) and small sizes runs eagerly on
the emulated device: every call that it makes there is one operator, and a graph holds the same ones as the eager step.
How long an operator takes cannot be seen here; the floor below is arithmetic from stated bandwidths.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLAN = {
    "num_hidden_layers": 40,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "engram_layer_ids": [1, 14],
    "dspark_target_layer_ids": [37, 38, 39],
}
STEPS = {"prefill of 17 tokens": (0, 1), "decode of 6 tokens (1 request, 5 drafts)": (2, 3)}
#: Stated by the vendor, bytes per second of one die: Atlas A2 (910B, 64 GB HBM2e) and A3 (910C, per die).
BANDWIDTH = {"A2": 1.6e12, "A3": 1.6e12}
EMPTY = re.compile(r"\[(?:\d+,)*0(?:,\d+)*\]")
BYTES = {"b8": 1, "i8": 1, "u8": 1, "i16": 2, "f16": 2, "bf16": 2, "i32": 4, "f32": 4, "i64": 8, "f64": 8}
#: These read or write a few rows of a cache or table: their largest operand is left out.
ROWS = {"npu_quant_lightning_indexer_v3", "latents", "compressed", "pool", "keep"}
ROWS |= {"lookup_mapped", "rows", "aten::embedding", "aten::index_select", "aten::gather"}


def _counted(lines: list[str]) -> list[str]:
    """Names of what a device would run: nothing for tensors without elements."""
    names = []
    for line in lines:
        kind, _, rest = line.partition(" ")
        name, _, arguments = rest.partition("(")
        if kind == "aten" and EMPTY.search(arguments.partition("]")[0] + "]"):
            continue
        names.append(name)
    return names


def _moved(lines: list[str]) -> Counter[str]:
    """Bytes of the operands of every operator, by name; the experts' weights are counted whole."""
    moved = Counter[str]()
    for line in lines:
        name = line.partition(" ")[2].partition("(")[0]
        line = re.sub(r"(ori|cmp)_kv=\S+", "", line)  # two caches
        sizes = []
        for dtype, shape in re.findall(r"\b(bf16|[bfiu]\d+)\[([\d,]*)\]", line):
            count = 1
            for part in filter(None, shape.split(",")):
                count *= int(part)
            sizes.append(count * BYTES[dtype])
        if name in ROWS and sizes:
            sizes.remove(max(sizes))
        moved[name] += sum(sizes)
    return moved


def _kind(name: str) -> str:
    if name in ("aten::copy_", "aten::clone", "aten::_to_copy"):
        return "copies and casts"
    if name.startswith("aten::index"):
        return "index operators"
    return "other PyTorch operators" if name.startswith("aten::") else "fused kernels"


def _table(title: str, counts: Counter[str]) -> None:
    kinds: Counter[str] = Counter()
    for name, count in counts.items():
        kinds[_kind(name)] += count
    print(f"  {title}: {sum(counts.values())} ({', '.join(f'{kinds[k]} {k}' for k in sorted(kinds))})")


def report(calls: list[dict[str, Any]]) -> None:
    """Counts of each step, and of a middle layer."""
    for call in calls:
        call["names"] = Counter(line.partition(" ")[2].partition("(")[0] for line in call["lines"])
    for title, (target, rest) in STEPS.items():
        print(title)
        inside, outside, layers = Counter[str](), Counter[str](), {}
        for label, counts in calls[target]["labels"].items():
            (inside if label.startswith("target") else outside).update(counts)
            if (found := re.search(r"layers\.(\d+)", label)) is not None:
                layers[int(found.group(1))] = sum(counts.values())
        _table("target, in the graph of a decode step", inside)
        _table("around it, eager", outside)
        drafted = Counter(_counted(calls[rest]["lines"]))
        _table("sampling, verification and draft, eager", drafted)
        usual = Counter(layers.values()).most_common(1)[0]
        print(f"  layers: {usual[1]} of {len(layers)} with {usual[0]} operators, the most {max(layers.values())}")
        moved = _moved(calls[target]["lines"])
        print("  by name: calls, bytes of operands a call (weights whole, caches and tables left out)")
        for name, count in inside.most_common(24):
            print(f"    {name:40} {count:5} {moved[name] // max(calls[target]['names'][name], 1):10,}")


def floor(tokens: int, ranks: int, context: int) -> dict[str, float]:
    """Bytes that a decode step of the released model reads on one of ``ranks`` devices (TP = EP = ranks), W8A8, by
    what reads them."""
    hidden, inner, experts, chosen, head = 5120, 2304, 384, 6, 512
    expert = 3 * inner * hidden
    hit = experts / ranks * (1 - (1 - chosen / experts) ** tokens)
    attention = 1792 * hidden + (32768 * 1280 + 2 * 8192 * 4096 + 2 * hidden * 8192) / ranks
    small = 4 * experts * hidden + 2 * 4 * 24 * 4 * hidden
    cache = tokens * 2 * head * (128 + 512)
    return {
        "grouped products of experts": 40 * hit * expert,
        "shared experts": 40 * expert / ranks,
        "linears of attention": 40 * attention,
        "router and hyper-connections": 40 * small,
        "sparse attention": 40 * cache,
        "indexer": tokens * 130 * (3 * context / 2 + 5 * context),  # three sources of ratio 2, five of ratio 1
        "head": 4 * 129280 * hidden / ranks,
    }


def main() -> None:
    """Set the device up, trace, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint")
    args = parser.parse_args()
    if "EMULATED_NPU" not in os.environ:
        setup = ROOT / "tests" / "emulated_npu" / "setup"
        sys.exit(subprocess.run([sys.executable, setup, __file__, *sys.argv[1:]]).returncode)
    sys.path.insert(0, str(ROOT / "tests"))
    from emulated_npu.ours.trace import run

    from vllm_ascend_dsv41.quant import Weights, convert
    from vllm_ascend_dsv41.tiny_checkpoint import Sizes, write_checkpoint

    converted = args.work / "converted"
    if not converted.exists():
        write_checkpoint(Sizes(**PLAN), args.work / "official")
        convert(args.work / "official", converted, Weights.W8A8)
    traced = run(
        converted,
        "a",
        (17,),
        args.work / "trace.safetensors",
        drafts=True,
        record=True,
        max_num_seqs=1,
        num_gpu_blocks_override=256,
    )
    report(traced.calls)
    print("floor of a decode step, TP8/EP8, 32,768 tokens of context: bytes read, and the time at the stated bandwidth")
    for tokens in (1, 8, 48):
        parts = floor(tokens, 8, 32768)
        read = sum(parts.values())
        times = ", ".join(f"{name} {1e3 * read / speed:.2f} ms" for name, speed in BANDWIDTH.items())
        print(f"  {tokens:3} tokens: {read / 2**30:.2f} GiB, {times}")
        print(f"      {', '.join(f'{name} {size / 2**20:,.0f} MiB' for name, size in parts.items())}")


if __name__ == "__main__":
    main()
