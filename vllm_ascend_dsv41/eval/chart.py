"""The latency-throughput curve of a perf run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .errors import EvalError
from .manifest import Level


def chart(levels: Sequence[Level], path: Path, model: str) -> None:
    """Time per output token and time to the first one over the throughput, a curve for each tool, levels by their
    concurrency. Raises EvalError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise EvalError("matplotlib is missing; pip install 'vllm-ascend-dsv41[eval]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for axis, name, label in ((axes[0], "tpot", "time per output token"), (axes[1], "ttft", "time to first token")):
        for tool, marker in (("aisbench", "o"), ("vllm", "s")):
            shown = [level for level in levels if level.tool == tool and getattr(level, name)]
            points = [(level.useful_throughput, 1000 * getattr(level, name)["mean"]) for level in shown]
            if not points:
                continue
            axis.plot(*zip(*points, strict=True), marker=marker, label=tool)
            for level, point in zip(shown, points, strict=True):
                axis.annotate(str(level.concurrency), point, textcoords="offset points", xytext=(4, 4), fontsize=8)
        axis.set_xlabel("output tokens per second, of answers that do not loop")
        axis.set_ylabel(f"{label}, mean, ms")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"{model}; numbers at the points: requests at once")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
