"""Tensor, expert and data parallelism on gloo: the same answers as one process gives."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from serving.pictures import of_golden
from vllm_ascend_dsv41.deploy.server import Server
from vllm_ascend_dsv41.reference import Grid, State

pytestmark = pytest.mark.long

TOKENS = 12
# one NUMA node: each rank gets a core of its own; without it vLLM asks for as many nodes as ranks
CORES = sorted(os.sched_getaffinity(0))
BIND = {"VLLM_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}"}
BIND4 = {"VLLM_CPU_OMP_THREADS_BIND": "|".join([f"{CORES[0]}|{CORES[-1]}"] * 2)}
MODES = {
    "tp2": {"tensor_parallel_size": 2},
    "tp2-ep2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
}
DRAFTS = {"method": "dspark", "num_speculative_tokens": 5, "enforce_eager": True}


def generate(model: Path, options: dict, prompts: list[list[int]], **more) -> list[dict]:
    """Tokens and log probabilities from a fresh process."""
    common = {"enforce_eager": True, "max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    job = {"model": str(model), "options": {**common, **options}, "prompts": prompts, "tokens": TOKENS, **more}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("generate.py"))],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **BIND},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    # vLLM may have a word to say after it: workers that are slow to end
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[{")))


@pytest.mark.parametrize("mode", MODES)
def test_tokens_in_float32(converted, reference, prompts, mode):
    """TP=2 and EP=2 give the reference's tokens, which one process gives (test_grids.py); with experts divided, under
    drafts that are often accepted."""
    drafting = "ep2" in mode
    directory = converted("a", "bf16-good" if drafting else "bf16")
    asked, model = prompts(3, 40, 130, 300, seed=21), reference(directory)
    options = {"dtype": "float32", **MODES[mode], **({"speculative_config": DRAFTS} if drafting else {})}
    for prompt, result in zip(asked, generate(directory, options, asked), strict=True):
        logits = model(torch.tensor((prompt + result["tokens"])[:-1]), State()).logits[len(prompt) - 1 :]
        assert result["tokens"] == logits.argmax(-1).tolist()
        best = logits.log_softmax(-1)
        for step, found in enumerate(result["logprobs"]):
            for token, value in found.items():
                assert abs(value - float(best[step, int(token)])) < 1e-3


@pytest.mark.parametrize("tower", ["weights", "data"])
def test_pictures(converted, reference, golden, tower):
    """The tower divided among two ranks, or the pictures among its two copies: the reference's tokens."""
    directory = converted("a", "bf16")
    model, asked, files, wanted = reference(directory), [], [], []
    for number in (1, 2):
        inputs, exact = golden("a", f"image_{number}.official"), golden("a", f"image_{number}.exact-fp32")
        prompt = of_golden(exact, inputs)
        asked.append(prompt.short)
        files.append([base64.b64encode(inputs[f"image{k}.png"].numpy().tobytes()).decode() for k in range(number)])
        encoded = []
        for k in range(number):
            grid = tuple(inputs[f"image{k}.vit_grid"].tolist())
            encoded.append(model.vision.align(model.vision.tower(inputs[f"image{k}.patches"].float(), grid), grid))
        wanted.append((prompt, encoded))
    options = {"dtype": "float32", "mm_encoder_tp_mode": tower, **MODES["tp2"]}
    for (prompt, encoded), result in zip(wanted, generate(directory, options, asked, pictures=files), strict=True):
        tokens = torch.tensor(prompt.full + result["tokens"][:-1])
        types = torch.cat((prompt.types, torch.full((len(tokens) - len(prompt.types),), -1)))
        logits = model(tokens, State(), model.merge_images(tokens, types, encoded)).logits[len(prompt.full) - 1 :]
        assert result["tokens"] == logits.argmax(-1).tolist()
        best = logits.log_softmax(-1)
        for step, found in enumerate(result["logprobs"]):
            assert all(abs(value - float(best[step, int(token)])) < 1e-3 for token, value in found.items())


@pytest.mark.parametrize("mode", MODES)
def test_w8a8(converted, reference, prompts, mode):
    """The shared expert's second linear (under TP also the routed experts') is split by input columns, and each
    rank rounds its own part: tokens may differ where the two best logits are that close."""
    directory = converted("a", "w8a8")
    asked, model = prompts(3, 40, 130, 300, seed=22), reference(directory, Grid.W8A8, torch.bfloat16)
    equal = total = 0
    for prompt, result in zip(asked, generate(directory, {"dtype": "bfloat16", **MODES[mode]}, asked), strict=True):
        logits = model(torch.tensor((prompt + result["tokens"])[:-1]), State()).logits[len(prompt) - 1 :]
        served = torch.tensor(result["tokens"])
        gap = logits.amax(1) - logits.gather(1, served[:, None])[:, 0]
        assert gap.max() <= 2.0
        equal += int((logits.argmax(-1) == served).sum())
        total += len(served)
    assert equal >= 0.9 * total


# how experts and Engram tables are spread over two replicas, in as few servers as show it
DATA_PARALLEL = {
    "dp2": [],
    "dp2-ep2-engram-shared": ["--enable-expert-parallel", "--engram-config", '{"dp_shared_memory": true}'],
    "dp2-tp2-engram-divided": ["--tensor-parallel-size", "2", "--engram-config", '{"embedding_across_dp": true}'],
}


@pytest.mark.parametrize("mode", DATA_PARALLEL)
def test_data_parallel_server(converted, reference, prompts, tmp_path, mode):
    """Two replicas behind one port, which draft; requests of unequal length leave one idle while the other works."""
    directory = converted("a", "bf16-good")
    options = ["--quantization", "ascend", "--tokenizer-mode", "deepseek_v41", "--block-size", "128", "--enforce-eager"]
    options += ["--dtype", "float32", "--max-num-batched-tokens", "256", "--max-num-seqs", "8"]
    options += ["--data-parallel-size", "2", "--api-server-count", "1"]
    options += ["--speculative-config", json.dumps(DRAFTS)]
    options += DATA_PARALLEL[mode]
    asked, model = prompts(3, 40, 130, 300, 17, 64, seed=23), reference(directory)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO", **(BIND4 if "tp2" in mode else {})}
    with Server(directory, options, tmp_path / "log", env=environment) as server:

        def complete(prompt: list[int]) -> list[int]:
            body = {
                "model": str(directory),
                "prompt": prompt,
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            request = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["choices"][0]["token_ids"]

        alone = complete(asked[0])
        with ThreadPoolExecutor(len(asked)) as pool:
            served = list(pool.map(complete, asked))
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    accepted = re.findall(
        r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d)"\} (\S+)', metrics, re.M
    )
    assert {position for position, count in accepted if float(count) > 0} == set("01234")
    assert len(re.findall(r'^dsv41:draft_stuck\{engine="[01]",.*\} 0\.0', metrics, re.M)) == 2
    log = (tmp_path / "log").read_text()
    assert ("hash columns 0 to " in log) == ("divided" in mode)
    assert ("one copy for 2 ranks" in log) == ("shared" in mode)
    assert alone == served[0]
    for prompt, tokens in zip(asked, served, strict=True):
        logits = model(torch.tensor((prompt + tokens)[:-1]), State()).logits[len(prompt) - 1 :]
        assert tokens == logits.argmax(-1).tolist()
