"""A plan as text and as a chart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..launch import table
from .device import GIB
from .memory import MemoryPlan, Part


def text(plan: MemoryPlan) -> str:
    """What people read."""
    lines = [f"{plan.recipe}: {plan.shape}, {plan.model}", "", "One rank, GiB of device memory"]
    lines += _parts(plan.rank)
    lines += ["", f"One node, GiB of host memory ({plan.host_available / GIB:.0f} there)", *_parts(plan.host)]
    lines += ["", "A container of the node", *_facts(plan.host_limits)]
    lines += ["", "Key-value cache", *_facts(plan.cache)]
    lines += ["", "Decode graphs", f"  {len(plan.graphs['sizes'])} sizes: {_short(plan.graphs['sizes'])}"]
    if plan.exchange:
        lines += ["", "Exchange of experts' tokens", *_facts(plan.exchange)]
    lines += ["", "Limits", *_facts(plan.limits)]
    if plan.published:
        lines += ["", "Beside published figures of the released model"]
        rows = [
            (
                f"  {row['name']}",
                f"{row['published']:g}",
                f"{row['computed']:g} {row['unit']}",
                f"{row['deviation_percent']:+.1f} %",
                row["note"],
            )
            for row in plan.published
        ]
        lines += table([("", "published", "here", "", ""), *rows]).splitlines()
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"PROBLEM: {problem}" for problem in plan.problems]
    lines.append("fits" if plan.fits else "does not fit")
    lines.append(
        "computed: from tensor shapes and vLLM's arithmetic; estimated: the basis stands beside it. Nothing was "
        "measured on an NPU."
    )
    return "\n".join(lines)


def _parts(parts: Sequence[Part]) -> list[str]:
    total = sum(part.bytes for part in parts)
    rows = [(f"  {part.name}", f"{part.bytes / GIB:8.2f}", part.how, part.basis) for part in parts]
    return table([*rows, ("  together", f"{total / GIB:8.2f}", "", "")]).splitlines()


def _facts(facts: dict[str, Any]) -> list[str]:
    rows = []
    for name, value in facts.items():
        if value is None or name == "by_cache":  # long; in the JSON
            continue
        if isinstance(value, dict):
            value = ", ".join(f"{key}: {item:,}" for key, item in value.items())
        elif isinstance(value, int):
            value = f"{value:,}"
        rows.append((f"  {name.replace('_', ' ')}", str(value)))
    return table(rows).splitlines()


def _short(sizes: Sequence[int]) -> str:
    shown = list(map(str, sizes))
    return ", ".join(shown if len(shown) <= 12 else [*shown[:6], "...", *shown[-3:]]) or "none"


def chart(plan: MemoryPlan, path: Path) -> None:
    """One bar for a rank's memory and one for the node's, as a picture. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(f"--plot {path}: matplotlib is missing; pip install 'vllm-ascend-dsv41[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    suffix = path.suffix.lstrip(".").lower()
    if suffix not in ("png", "svg", "pdf") or not path.parent.is_dir():
        raise ValueError(f"--plot {path}: expected NAME.png, .svg or .pdf in a directory that exists")
    figure, axes = pyplot.subplots(2, 1, figsize=(11, 5.2), height_ratios=[1, 1])
    for axis, title, parts, limit in (
        (axes[0], f"one rank: {plan.usable / GIB:.1f} GiB of device memory usable", plan.rank, plan.usable),
        (axes[1], f"one node: {plan.host_available / GIB:.0f} GiB of host memory", plan.host, plan.host_available),
    ):
        left = 0.0
        shown = [part for part in parts if part.bytes > 0]
        colours = list(map(pyplot.get_cmap("tab20"), range(20)))
        for number, part in enumerate(shown):
            width = part.bytes / GIB
            empty = part.name == "headroom"
            axis.barh(
                0,
                width,
                left=left,
                color="white" if empty else colours[number % len(colours)],
                edgecolor="grey",
                hatch="" if part.how == "computed" else "//",
                label=f"{part.name} {width:.1f}",
            )
            left += width
        axis.axvline(limit / GIB, color="red")
        axis.set_yticks([])
        axis.set_xlabel("GiB; hatched: estimated; red: what there is")
        axis.set_title(title, loc="left", fontsize=10)
        axis.legend(ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    figure.suptitle(f"{plan.recipe} ({plan.shape}): {'fits' if plan.fits else 'does not fit'}")
    figure.tight_layout()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(partial, dpi=110, format=suffix)
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"--plot {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
        pyplot.close(figure)
