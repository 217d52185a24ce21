"""How far W8A8 logits lie from the exact model, ours and vllm-ascend's own, on many prompts: one prompt says little.

    .venv/bin/python benchmarks/peer_error.py --work DIR --preset a --prompts 60 [--scales float32]

Both serve the same conversion on the emulated NPU and are forced along the greedy tokens of the reference in float32,
which computes from the official checkpoint. A row of logits whose route or selection flips somewhere is far off,
whoever computes it; how many do is chance, so what counts is the mean over many rows, and its standard error is given.

``dsv41 quantize`` writes scales of weights that BF16 holds exactly. Other converters do not: with ``--scales float32``
every scale is moved by up to 2 ** -8, and the exact logits are those of that checkpoint, with activations not rounded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
STEPS = 12
FLIPPED = 0.03  # relative error of a row that rounding alone does not reach on these checkpoints
PLUGINS = {
    "ours": "dsv41,ascend_kv_connector,ascend_model_loader",
    "vllm-ascend": "ascend,ascend_kv_connector,ascend_model,ascend_model_loader",
}


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Random ids; lengths from 9 to 100."""
    chance = torch.Generator().manual_seed(7)
    lengths = torch.randint(9, 101, (count,), generator=chance).tolist()
    return [torch.randint(5, vocabulary - 12, (n,), generator=chance).tolist() for n in lengths]


def exact(official: Path, given: list[list[int]], out: Path) -> None:
    """Logits of every prompt position and of STEPS greedy steps, by the reference in float32."""
    from vllm_ascend_dsv41.reference import Checkpoint, Model, State

    model = Model(Checkpoint(official))
    found: dict[str, Tensor] = {}
    for number, prompt in enumerate(given):
        state = State()
        rows = [model(torch.tensor(prompt), state).logits]
        tokens: list[int] = []
        for _ in range(STEPS):
            tokens.append(int(rows[-1][-1].argmax()))
            rows.append(model(torch.tensor(tokens[-1:]), state).logits)
        found[f"{number}.prefill"], found[f"{number}.decode"] = rows[0], torch.cat(rows[1:])
        found[f"{number}.tokens"] = torch.tensor(tokens)
    save_file(found, out)


def served(model: Path, preset: str, wanted: Path, out: Path, ours: bool) -> None:
    """The same logits by an engine on the emulated device; through an FP32 head in prefill, as said in decode."""
    from emulated_npu.peer.engine import Engine
    from emulated_npu.peer.measure import engine, head_of

    along = load_file(wanted)
    given = prompts(len(along) // 3, _vocabulary(model))
    own = Engine(str(model), quantization="ascend") if ours else engine(str(model), preset)
    head, found = head_of(str(model)), {}
    for number, prompt in enumerate(given):
        trace = own.run(prompt, along[f"{number}.tokens"].tolist(), STEPS + 1)
        n = len(prompt)
        found[f"{number}.prefill"] = trace.rows(trace.hidden, range(n)).float() @ head.t()
        found[f"{number}.decode"] = trace.rows(trace.logits, range(n, n + STEPS))
    save_file({k: v.contiguous() for k, v in found.items()}, out)
    sys.stdout.flush()
    os._exit(0)  # interpreters of Triton and vLLM's threads take their time to end


def _moved(model: Path, target: Path) -> Path:
    """A copy whose weight scales need all of float32."""
    if not target.exists():
        chance = torch.Generator().manual_seed(11)
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(model, partial)
        for path in sorted(partial.glob("*.safetensors")):
            tensors = load_file(path)
            if "_engram_embed." in path.name or not any(name.endswith("weight_scale") for name in tensors):
                continue
            for name in sorted(tensors):
                if name.endswith("weight_scale"):
                    factor = 1 + torch.rand(tensors[name].shape, generator=chance) * 2**-8
                    tensors[name] = (tensors[name] * factor).float()
            path.unlink()
            save_file(tensors, path, metadata={"format": "pt"})
        partial.rename(target)
    return target


def _vocabulary(model: Path) -> int:
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def report(wanted: Path, found: dict[str, Path]) -> None:
    """Root mean square error relative to the exact logits: mean over prompts, standard error, rows that flipped."""
    right = load_file(wanted)
    errors: dict[tuple[str, str], Tensor] = {}
    for name, path in found.items():
        logits = load_file(path)
        for part in ("prefill", "decode"):
            keys = [k for k in right if k.endswith(part)]
            rms = torch.tensor([float((logits[k] - right[k]).norm() / right[k].norm()) for k in keys])
            rows = torch.cat([(logits[k] - right[k]).norm(dim=1) / right[k].norm(dim=1) for k in keys])
            errors[name, part] = rms
            calm = rows[rows < FLIPPED]
            print(
                f"{name:12} {part:8} rms {rms.mean():.4f} +- {rms.std() / len(rms) ** 0.5:.4f} of {len(rms)} prompts, "
                f"median row {rows.median():.4f}, {len(rows) - len(calm)} of {len(rows)} rows flipped, the rest "
                f"{calm.square().mean().sqrt():.4f}"
            )
    for part in ("prefill", "decode"):
        more = errors["ours", part] - errors["vllm-ascend", part]
        print(f"ours - vllm-ascend, {part}, paired: {more.mean():+.4f} +- {more.std() / len(more) ** 0.5:.4f}")


def main() -> None:
    """Checkpoints, the exact logits, both engines, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for logits")
    parser.add_argument("--preset", choices=("a", "c"), default="a")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--scales", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--engine", choices=PLUGINS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "EMULATED_NPU" not in os.environ:
        setup = ROOT / "tests" / "emulated_npu" / "setup"
        sys.exit(subprocess.run([sys.executable, setup, __file__, *sys.argv[1:]]).returncode)
    from emulated_npu.peer import checkpoint

    torch.set_grad_enabled(False)
    model = checkpoint.converted(args.preset, "w8a8")
    float32 = args.scales == "float32"
    if float32:
        model = _moved(model, args.work / f"{args.preset}-float32-scales")
    wanted = args.work / f"{args.preset}-exact.safetensors"
    paths = {name: args.work / f"{args.preset}-{name}.safetensors" for name in PLUGINS}
    if args.engine:
        served(model, args.preset, wanted, paths[args.engine], args.engine == "ours")
    args.work.mkdir(parents=True, exist_ok=True)
    official = model.parent / f"{args.preset}-official" / "checkpoint"
    exact(model if float32 else official, prompts(args.prompts, _vocabulary(model)), wanted)
    for name in PLUGINS:
        variables = {**os.environ, "VLLM_PLUGINS": PLUGINS[name], "VLLM_USE_V2_MODEL_RUNNER": "0"}
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--engine", name], env=variables, check=True)
    report(wanted, paths)


if __name__ == "__main__":
    main()
