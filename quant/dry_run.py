"""What a conversion would read and write, and about how long it would compute, from the config alone."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import OFFICIAL_INDEX, description_labels, read_config
from .convert import open_source
from .describe import side_files, small_bytes
from .inventory import GROUP, Kind, Stored, Weights, inventory
from .plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from .work import kernels

GIB = 1 << 30
SAMPLE = (1024, 2048)  # rows and columns of the timed blocks


def section(key: str) -> str:
    """Part of the model that a tensor belongs to: trunk, draft, vision or engram."""
    if key.startswith("mtp."):
        return "draft"
    if key.startswith(("vision.", "aligner.", "image_")):
        return "vision"
    return "engram" if ".engram." in key else "trunk"


def dry_run(
    source: str | Path,
    target: str | Path,
    weights: Weights,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    rotate: bool = False,
    workers: int | None = None,
) -> dict[str, Any]:
    """The plan of ``convert`` with the same arguments, as JSON types. Nothing is written.

    ``source`` needs a ``config.json`` only; where it has an index, the whole checkpoint is checked as ``convert`` does.
    Keys: ``input`` and ``output`` (``tensors``: every tensor, ``bytes``; of the output also ``files``, and ``counts``
    of tensors by label and section), ``room`` (bytes free and needed), ``estimate`` (computing time; ``measured``:
    bytes of input per second and core, by kind, on this machine). Raises CheckpointError, ConfigError.
    """
    source, target = Path(source), Path(target)
    config = open_source(source).config if (source / OFFICIAL_INDEX).is_file() else read_config(source)
    plan = make_plan(config, weights, shard_bytes, rotate)
    workers = workers or len(os.sched_getaffinity(0))
    read = [stored for spec in inventory(config) for stored in spec.official()]
    parent = target.absolute().parent
    needed = plan.bytes + small_bytes(side_files(source), config, plan)
    return {
        "source": str(source),
        "target": str(target),
        "weights": weights.value,
        "rotate": "quarot" if rotate else "none",
        "input": {"bytes": sum(item.bytes for item in read), "tensors": [_tensor(item) for item in read]},
        "output": _output(plan, description_labels(config, weights)),
        "room": {"needed": needed, "free": shutil.disk_usage(parent).free if parent.is_dir() else None},
        "estimate": _estimate(config, workers),
    }


def _tensor(stored: Stored) -> dict[str, Any]:
    return {"name": stored.key, "dtype": stored.dtype, "shape": list(stored.shape), "bytes": stored.bytes}


def _output(plan: Plan, labels: Mapping[str, str]) -> dict[str, Any]:
    tensors = [
        {**_tensor(stored), "label": labels[stored.key], "file": file.name}
        for file in plan.files
        for stored in file.tensors
    ]
    counts = Counter((section(str(item["name"])), str(item["label"])) for item in tensors)
    return {
        "bytes": plan.bytes,
        "files": [{"name": file.name, "bytes": file.header()[2], "tensors": len(file.tensors)} for file in plan.files],
        "counts": [{"section": part, "label": label, "tensors": n} for (part, label), n in sorted(counts.items())],
        "tensors": tensors,
    }


def _estimate(config: Mapping[str, Any], workers: int) -> dict[str, Any]:
    """Computing alone, measured on blocks in memory: a tenth of a second for each kernel."""
    rates = {kind.name: rate for kind, rate in measure().items()}
    read: Counter[str] = Counter()
    for spec in inventory(config):
        size = sum(stored.bytes for stored in spec.official())
        read["BF16" if spec.kind.name not in rates else spec.kind.name] += size
    seconds = sum(size / rates[kind] for kind, size in read.items())
    return {"workers": workers, "compute_seconds": seconds / workers, "core_seconds": seconds, "measured": rates}


def measure(seconds: float = 0.1) -> dict[Kind, float]:
    """Bytes of input per second that one core converts, for the kinds that matter."""
    random, module = np.random.default_rng(0), kernels()
    rows, columns = SAMPLE
    weight = random.integers(0, 127, SAMPLE, dtype=np.uint8)
    exponents = random.integers(115, 125, (rows, columns // GROUP), dtype=np.uint8)
    codes, scales = np.empty(SAMPLE, np.int8), np.empty(rows, np.float32)
    groups, values, bits = (
        np.empty((rows, columns // GROUP), np.float32),
        np.empty(SAMPLE, np.float32),
        weight.astype("u2"),
    )
    packed, tiles = np.ascontiguousarray(weight[:, : columns // 2]), np.ascontiguousarray(exponents[: rows // GROUP])
    jobs: dict[Kind, tuple[int, Callable[[], int]]] = {
        Kind.EXPERT: (packed.nbytes, lambda: module.int8_from_mxfp4(packed, exponents, codes, scales)),
        Kind.LINEAR: (weight.nbytes, lambda: module.int8_from_fp8_tiles(weight, tiles, codes, scales)),
        Kind.FLOAT_LINEAR: (weight.nbytes, lambda: module.float_from_fp8(weight, tiles, GROUP, values)),
        Kind.TABLE: (weight.nbytes, lambda: module.engram_int8_from_fp8(weight, exponents, codes, groups)),
        Kind.BF16: (bits.nbytes, lambda: module.float_from_bf16(bits, values)),
    }
    result = {}
    for kind, (size, job) in jobs.items():
        job()
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            job()
            count += 1
        result[kind] = count * size / (time.perf_counter() - start)
    return result


def print_report(report: Mapping[str, Any], every_tensor: bool) -> None:
    """The report for people; ``every_tensor``: also each output tensor with its label, dtype, shape and file."""
    output, room, estimate = report["output"], report["room"], report["estimate"]
    print(
        f"{report['source']} -> {report['target']}: {report['weights']}, rotation {report['rotate']}; nothing written"
    )
    print(f"reads   {len(report['input']['tensors']):9,} tensors {report['input']['bytes']:20,} bytes")
    print(f"writes  {len(output['tensors']):9,} tensors {output['bytes']:20,} bytes in {len(output['files'])} files")
    for row in output["counts"]:
        print(f"        {row['tensors']:9,} {row['section']:7} {row['label']}")
    for file in output["files"]:
        print(f"  {file['name']:50} {file['tensors']:7,} tensors {file['bytes']:17,} bytes")
    if every_tensor:
        for tensor in output["tensors"]:
            print(
                f"  {tensor['name']:50} {tensor['label']:12} {tensor['dtype']:4} {tensor['shape']} in {tensor['file']}"
            )
    free = "unknown" if room["free"] is None else f"{room['free'] / GIB:,.1f} GiB"
    print(f"room    {room['needed'] / GIB:,.1f} GiB needed, {free} free at the target")
    print(
        f"time    at least {estimate['compute_seconds']:,.0f} s of computing with {estimate['workers']} workers "
        f"(measured now, from memory); storage adds the time of reading {report['input']['bytes'] / GIB:,.1f} GiB and "
        f"writing {output['bytes'] / GIB:,.1f} GiB"
    )
