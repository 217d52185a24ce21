"""What W8A8 costs in accuracy, weight by weight and end to end, with and without rotation: docs/quantisation.md.

    pip install -e .[plot]
    python benchmarks/quantisation_error.py --work DIR --plot docs/quantisation.png

Tiny checkpoints (presets a and c of the golden data), and the same with heavy-tailed weights: elements drawn from
Student's t with three degrees of freedom, and norm weights of which 3 % are ten times as large, so that a few channels
of every projection's input dominate, as in trained models. Everything by the reference in float32: ``weights``
quantises weights only, ``weights and activations`` also rounds activations to INT8 per token.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from measures import distance, rms

from vllm_ascend_dsv41.quant import Weights, convert
from vllm_ascend_dsv41.reference import Checkpoint, Grid, Model, State
from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes, tensors, write_checkpoint
from vllm_ascend_dsv41.tiny_checkpoint.formats import NamedRandom
from vllm_ascend_dsv41.verify import verify

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden"
PROMPTS = {"a": (40, 130, 300), "c": (40, 130)}
OUTLIERS, OUTLIER_GAIN = 0.03, 10.0
KINDS = {
    "wq_a, wq_b, wkv": r"attn\.(wq_a|wq_b|wkv)\.weight",
    "indexer.wq_b": r"attn\.indexer\.wq_b\.weight",
    "experts w1, w3": r"ffn\.experts\.\d+\.w[13]\.weight",
    "experts w2": r"ffn\.experts\.\d+\.w2\.weight",
    "shared experts": r"ffn\.shared_experts\.w\d\.weight",
    "Engram table": r"engram\.embed\.weight",
}


class HeavyTails(NamedRandom):
    """Draws from Student's t, and norm weights with outlier channels."""

    def normal(self, name: str, *shape: int) -> torch.Tensor:
        plain = super().normal(name, *shape)
        if name.endswith("norm.weight"):
            spikes = torch.rand(shape, generator=torch.Generator().manual_seed(len(name))) < OUTLIERS
            # the builder takes mean + 0.1 mean times this
            return torch.where(spikes, 10.0 * (OUTLIER_GAIN - 1.0), plain)
        if len(shape) < 2:
            return plain
        squares = sum(super(HeavyTails, self).normal(f"{name}#{i}", *shape).square() for i in range(3))
        return plain / (squares / 3).sqrt() / 3**0.5  # variance 3 without the last factor


@dataclass
class Case:
    """One checkpoint, converted in one way."""

    name: str
    source: Path
    converted: Path


def cases(work: Path) -> Iterator[Case]:
    """Make what is not there yet."""
    for preset in PROMPTS:
        for tails in ("", "-heavy"):
            source = work / f"{preset}{tails}"
            if not (source / "config.json").exists():
                normal, tensors.NamedRandom = tensors.NamedRandom, HeavyTails if tails else NamedRandom
                write_checkpoint(Sizes(**PRESETS[preset]), source)
                tensors.NamedRandom = normal
            for rotation in ("", "-quarot"):
                target = work / f"{preset}{tails}-w8a8{rotation}"
                if not target.exists():
                    convert(source, target, Weights.W8A8, rotate=bool(rotation))
                yield Case(f"{preset}{tails}{rotation}", source, target)


def prompt(preset: str, length: int) -> torch.Tensor:
    """Token ids of a golden prompt and its recorded continuation."""
    data = load_file(GOLDEN / preset / "golden" / f"text_{length:04d}.exact-fp32.safetensors")
    return torch.cat((data["input_ids"], data["decode_tokens"]))


@torch.no_grad()
def run(model: Model, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Logits, and the streams behind each layer."""
    streams: dict[int, torch.Tensor] = {}

    def tap(name: str, value: torch.Tensor) -> None:
        if match := re.fullmatch(r"layer(\d+)\.stream", name):
            streams[int(match[1])] = value

    return model(tokens, State(), tap=tap).logits, streams


def end_to_end(case: Case) -> tuple[list[Any], dict[int, float]]:
    """Figures of a table row, and the error of the streams by layer (weights and activations, longest prompt)."""
    preset, row, layers = case.name[0], [], {}
    source = Model(Checkpoint(case.source))
    matrix = Checkpoint(case.converted).rotation()
    for grid in (Grid.EXACT, Grid.W8A8):
        model, found, wanted = Model(Checkpoint(case.converted), grid=grid), [], []
        for length in PROMPTS[preset]:
            tokens = prompt(preset, length)
            logits, streams = run(model, tokens)
            right, right_streams = run(source, tokens)
            found.append(logits)
            wanted.append(right)
            layers = {i: rms(streams[i] @ matrix.T, right_streams[i]) for i in streams}
        row.append(distance(torch.cat(found), torch.cat(wanted)))
    return row, layers


def by_kind(case: Case) -> dict[str, dict[int, float]]:
    """Relative error of the weights by kind and layer, every row compared."""
    report = verify(case.converted, case.source, None)
    if not report.holds:
        raise RuntimeError([finding for finding in report.findings if finding.verdict == "FAIL"])
    sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for tensor in report.tensors:
        match = re.fullmatch(r"layers\.(\d+)\.(.+)", tensor.name)
        for kind, pattern in KINDS.items():
            if match and re.fullmatch(pattern, match[2]):
                sums[kind][int(match[1])].append(tensor.relative_error)
    return {
        kind: {layer: (sum(e * e for e in errors) / len(errors)) ** 0.5 for layer, errors in layers.items()}
        for kind, layers in sums.items()
    }


def plot(path: Path, weights: dict[str, dict[str, dict[int, float]]], streams: dict[str, dict[int, float]]) -> None:
    """Weights of set a, plain and heavy-tailed, by layer and kind; streams of all cases by layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    for axis, name in zip(axes, ("a", "a-heavy"), strict=False):
        for number, kind in enumerate(KINDS):
            for suffix, style in (("", "-o"), ("-quarot", "--x")):
                layers = weights[f"{name}{suffix}"].get(kind, {})
                label = kind if not suffix else None
                axis.plot(list(layers), [100 * e for e in layers.values()], style, color=f"C{number}", label=label)
        title = f"weights, set {name} (dashed: QuaRot)"
        axis.set(title=title, xlabel="layer", ylabel="relative error, %", ylim=(0, None))
        axis.legend(fontsize="small")
    for number, (name, layers) in enumerate(streams.items()):
        style = "--x" if name.endswith("quarot") else "-o"
        axes[2].plot(list(layers), [100 * e for e in layers.values()], style, color=f"C{number // 2}", label=name)
    axes[2].set(title="streams behind each layer, weights and activations", xlabel="layer", ylabel="relative error, %")
    axes[2].legend(fontsize="small")
    figure.savefig(path, dpi=90)
    print(f"wrote {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, made when missing")
    parser.add_argument("--plot", type=Path, help="file to write the plot to")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    weights, streams, rows = {}, {}, []
    for case in cases(arguments.work):
        weights[case.name] = by_kind(case)
        row, streams[case.name] = end_to_end(case)
        rows.append((case.name, row))
    print("| weights | kind | " + " | ".join(KINDS) + " |\n|---|---|" + "---|" * len(KINDS))
    for name, kinds in weights.items():
        cells = (kinds.get(kind, {}).values() for kind in KINDS)
        print(f"| {name} | " + " | ".join(f"{100 * max(c):.2f}" if c else "" for c in map(list, cells)) + " |")
    print("\n| case | weights: rms, KL, top-1 | weights and activations: rms, KL, top-1 |\n|---|---|---|")
    for name, row in rows:
        print(f"| {name} | " + " | ".join(f"{d.rms:.4f}, {d.kl_mean:.5f}, {d.top1:.3f}" for d in row) + " |")
    if arguments.plot:
        plot(arguments.plot, weights, streams)


if __name__ == "__main__":
    main()
