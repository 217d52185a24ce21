"""A tiny Llama on vllm-ascend's own runners: the tokens and log-probabilities of vLLM on CPU, in float32."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from emulated_npu import environment, llama

pytestmark = pytest.mark.long
GOLDEN = Path(__file__).parent / "golden" / "llama.json"


def run(tmp_path, variables, **options):
    folder = llama.checkpoint(tmp_path / "llama")
    command = [sys.executable, "-m", "emulated_npu.llama", str(folder), json.dumps(options)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def check(found):
    golden = json.loads(GOLDEN.read_text())
    assert found["tokens"] == golden["tokens"]
    for ours, theirs in zip(found["logprobs"], golden["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


def test_vllm_on_cpu_gives_the_golden_tokens(tmp_path):
    """UPDATE_GOLDEN=1 writes them."""
    variables = {**os.environ, "VLLM_PLUGINS": "none", "PYTHONPATH": str(environment.HERE.parent)}
    found = run(tmp_path, variables)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps({k: found[k] for k in ("tokens", "logprobs")}, indent=1) + "\n")
    check(found)


@pytest.mark.emulated_npu(fresh=True)
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_one_device(tmp_path, monkeypatch, runner, graphs):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner == "v2")))
    options = {"enforce_eager": False, "compilation_config": llama.GRAPHS} if graphs else {}
    found = llama.generate(str(llama.checkpoint(tmp_path / "llama")), **options)
    check(found)
    if graphs:
        counts = found["graphs"]
        assert counts["captures"] == 3
        assert counts["replays"] == 7
        assert counts["updates"] == counts["replays"] * 2, "one task group per layer and step"


@pytest.mark.emulated_npu(fresh=True, devices=2)
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graph"])
def test_two_devices(tmp_path, runner, graphs):
    options = {"enforce_eager": False, "compilation_config": llama.GRAPHS} if graphs else {}
    variables = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2"))}
    check(run(tmp_path, variables, tensor_parallel_size=2, **options))


@pytest.mark.emulated_npu(fresh=True)
def test_the_operators_of_a_decode_step(tmp_path, monkeypatch):
    """The calls of one decode step on runner V1, kept as golden data; UPDATE_GOLDEN=1 writes them."""
    from vllm import LLM, SamplingParams

    from emulated_npu import recorder

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    llm = LLM(str(llama.checkpoint(tmp_path / "llama")), **llama.OPTIONS, enforce_eager=True, async_scheduling=False)
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    recorder.label_layers(worker.model_runner.get_model())
    execute, steps = worker.execute_model, []

    def step(*arguments, **keywords):
        with recorder.recording() as record, recorder.labelled(f"step {len(steps)}"):
            steps.append(record)
            return execute(*arguments, **keywords)

    worker.execute_model = step
    llm.generate(
        [{"prompt_token_ids": [3, 5, 7]}],
        SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, detokenize=False),
    )
    decode = steps[1]
    layers = [decode.labels[f"step 1/layers.{i}"] for i in (0, 1)]
    assert layers[0]["aclnnFusedInferAttentionScoreV3"] == layers[1]["aclnnFusedInferAttentionScoreV3"] == 1
    assert layers[0]["aclnnSwiGlu"] == 1
    golden = GOLDEN.with_name("llama_decode.txt")
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text("\n".join(decode.lines) + "\n")
    difference = recorder.difference(golden.read_text().splitlines(), decode.lines)
    assert not difference, difference


@pytest.mark.emulated_npu(fresh=True)
def test_a_wrong_activation_shows(tmp_path):
    """Mutation: three times the output of SwiGLU changes the tokens."""
    from emulated_npu import aclnn

    aclnn.load()
    own = aclnn.OPERATORS["aclnnSwiGlu"].run

    def tripled(a):
        own(a)
        a.out.mul_(3)

    aclnn.OPERATORS["aclnnSwiGlu"].run = tripled
    with pytest.raises(AssertionError):
        check(llama.generate(str(llama.checkpoint(tmp_path / "llama"))))
