"""What our model computes along DeepSeek's tokens, on the emulated NPU or on the CPU, in a process of its own.

    python trace.py '{"model": DIR, "preset": "a", "lengths": [17], "out": FILE, "options": {...}}'

The file holds, by prompt length, the logits of all prompt positions (through an FP32 head) and of 24 decode steps; its
metadata the drafts and how many graphs were captured and replayed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TESTS = Path(__file__).parents[2]
PLUGINS = "dsv41,ascend_kv_connector,ascend_model_loader"


@dataclass
class Traced:
    """Of one run."""

    logits: dict[str, Tensor]  # "17.prefill" [17, V], "17.decode" [24, V]
    tokens: dict[str, list[int]]
    drafts: dict[str, list[tuple[int, list[int]]]]  # by length: position of the anchor, drafts behind it
    graphs: dict[str, int]
    calls: list[dict[str, Any]]  # of the first prompt, by call of the worker: {"step", "lines", "labels"}


def run(
    model: Any,
    preset: str,
    lengths: tuple[int, ...],
    out: Path,
    device: str = "npu",
    environment: dict[str, str] | None = None,
    drafts: bool = False,
    free: int = 0,
    record: bool = False,
    **options: Any,
) -> Traced:
    """Traces in a fresh process; ``device`` "cpu": outside of the emulated environment, with the NPU's index keys.

    free: tokens to generate untouched; 0: the golden ones are forced. record: the device operators of the first prompt.
    options: of ``vllm.LLM``.
    """
    variables = dict(os.environ)
    if device == "cpu":
        hidden = ("EMULATED_NPU", "FAKE_", "ASCEND_", "LD_LIBRARY_PATH", "TRITON_INTERPRET", "PYTHONPATH")
        variables = {k: v for k, v in variables.items() if not k.startswith(hidden)}
        variables |= {"DSV41_INDEX_KEYS": "int8", "VLLM_CPU_KVCACHE_SPACE": "1"}
    variables["VLLM_PLUGINS"] = "dsv41" if device == "cpu" else PLUGINS
    variables |= {"VLLM_USE_V2_MODEL_RUNNER": "0", **(environment or {})}
    work = {
        "model": str(model),
        "preset": preset,
        "lengths": lengths,
        "out": str(out),
        "drafts": drafts,
        "free": free,
        "record": record,
        "options": options,
    }
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(work)], env=variables, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    from safetensors import safe_open

    with safe_open(out, "pt") as file:
        said = json.loads(file.metadata()["said"])
        logits = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return Traced(logits, said["tokens"], said["drafts"], said["graphs"], said["calls"])


def _recorded(engine: Any) -> list[dict[str, Any]]:
    """Records what each call of the worker runs on the device, from now on."""
    from emulated_npu import recorder

    calls: list[dict[str, Any]] = []
    recorder.label_layers(engine.model, r"(layers|mtp)\.\d+$")
    engine.model.forward = recorder.under("target", engine.model.forward)

    def recording(step: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with recorder.recording() as record:
                result = method(*args, **kwargs)
            labels = {label: dict(counts) for label, counts in record.labels.items()}
            calls.append({"step": step, "lines": record.lines, "labels": labels})
            return result

        return call

    for name in ("execute_model", "sample_tokens"):
        setattr(engine.worker, name, recording(name, getattr(engine.worker, name)))
    return calls


def _main(
    model: str, preset: str, lengths: list[int], out: str, drafts: bool, free: int, record: bool, options: Any
) -> None:
    from safetensors.torch import save_file

    from emulated_npu.peer.engine import DSPARK, Engine
    from emulated_npu.peer.measure import STEPS, head_of, prompt_of

    if drafts:
        options["speculative_config"] = {**DSPARK, **options.get("speculative_config", {})}
    graphs = options.pop("graphs", False)
    engine = Engine(model, graphs=graphs, quantization="ascend", **options)
    head = head_of(model)
    logits, said = {}, {"tokens": {}, "drafts": {}, "graphs": {}, "calls": []}
    calls = _recorded(engine) if record else []
    for length in lengths:
        prompt, tokens = prompt_of(preset, length)
        trace = engine.run(prompt, tokens if not free else None, free or STEPS + 1)
        hidden = trace.rows(trace.hidden, range(length)).float()
        logits[f"{length}.prefill"] = hidden @ head.t()
        steps = free - 1 if free else STEPS  # the first token comes from the prompt
        logits[f"{length}.decode"] = trace.rows(trace.logits, range(length, length + steps))
        said["calls"] = said["calls"] or list(calls)
        said["tokens"][str(length)], said["drafts"][str(length)] = trace.tokens, trace.drafts
    if "EMULATED_NPU" in os.environ:
        from emulated_npu import graphs as counted

        said["graphs"] = dict(counted.counts)
    save_file({k: v.contiguous() for k, v in logits.items()}, out, metadata={"said": json.dumps(said)})
    sys.stdout.flush()
    os._exit(0)  # interpreters of Triton and vLLM's threads take their time to end


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    torch.set_grad_enabled(False)
    _main(**json.loads(sys.argv[1]))
