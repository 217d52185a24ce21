"""The server over HTTP, and refusals before it starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from vllm_ascend_dsv41.deploy.server import Server

REFUSED = {
    "no quantization": ([], "dsv41 quantize SRC DST"),
    "pooling": (["--runner", "pooling"], "--runner pooling: DeepSeek-V4.1 generates text"),
    "dummy weights": (["--load-format", "dummy"], "--load-format dummy: random weights"),
    "prompt embeddings": (["--enable-prompt-embeds"], "--enable-prompt-embeds: Engram hashes token ids"),
    "cache dtype": (["--kv-cache-dtype", "bfloat16", "--dtype", "float32"], "--kv-cache-dtype bfloat16"),
    "one kind of cache": (["--disable-hybrid-kv-cache-manager"], "--disable-hybrid-kv-cache-manager"),
    "offloading": (["--kv-offloading-size", "1"], "--kv-offloading-size"),
    "ranks": (["--tensor-parallel-size", "8"], "--tensor-parallel-size 8: must divide o_groups = 4"),
    "lora": (["--enable-lora"], "--enable-lora: LoRA is not supported"),
    "no tower, and divided": (
        ["--language-model-only", "--mm-encoder-tp-mode", "data"],
        "--language-model-only with --mm-encoder-tp-mode data",
    ),
    "image embeddings": (["--enable-mm-embeds"], "--enable-mm-embeds"),
    "fp8 cache": (["--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: rows are kept in the model's dtype"),
    "odd block": (["--block-size", "33"], "--block-size 33: must be a multiple of 2"),
}


def engine_config(model: Path, *options: str):
    """What vLLM makes of command-line options, without starting anything."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", str(model), "--tokenizer-mode", "deepseek_v41", *options])
    return EngineArgs.from_cli_args(arguments).create_engine_config()


def test_guide_flags_give_the_expected_config(converted):
    config = engine_config(converted("a", "w8a8"), "--quantization", "ascend", "--block-size", "128")
    assert config.cache_config.block_size == 128
    assert config.scheduler_config.enable_chunked_prefill
    assert config.cache_config.enable_prefix_caching
    assert config.parallel_config.worker_cls == "vllm_ascend_dsv41.worker.cpu.CpuWorker"
    assert config.model_config.dtype.__str__() == "torch.bfloat16"


def test_ascend_is_recognised_without_the_flag(converted):
    config = engine_config(converted("a", "w8a8"))
    assert config.model_config.quantization == "ascend"
    assert config.cache_config.block_size == 128


@pytest.mark.parametrize("what", [name for name in REFUSED if name != "no quantization"])
def test_options_are_refused_with_the_reason(converted, what):
    options, message = REFUSED[what]
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        engine_config(converted("a", "w8a8"), "--quantization", "ascend", *options)


@pytest.mark.parametrize("flag", [["--quantization", "ascend"], []])
def test_official_checkpoint_is_refused(official, flag):
    """With vLLM's own entry, before anything is loaded."""
    with pytest.raises(ValueError, match="dsv41 quantize SRC DST"):
        engine_config(official("a"), *flag)


def test_damaged_checkpoint_is_refused_by_vllm_itself(converted, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(converted("a", "w8a8"), copy)
    (copy / "quant_model_weights-00001-of-00001.safetensors").unlink()
    with pytest.raises(ValueError, match="files that the index names are missing"):
        engine_config(copy, "--quantization", "ascend")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda official, converted, tmp: official("a"), "this is the official checkpoint; convert it first"),
        (lambda official, converted, tmp: tmp, "not a checkpoint, config.json is missing"),
        (lambda official, converted, tmp: tmp / "nowhere", "no such directory"),
    ],
)
def test_serve_refuses_in_seconds(official, converted, tmp_path, make, message):
    start = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "vllm_ascend_dsv41.cli",
            "serve",
            str(make(official, converted, tmp_path)),
            "--quantization",
            "ascend",
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("dsv41: error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "vllm" not in done.stdout
    assert time.monotonic() - start < 60  # vLLM itself is not even imported


@pytest.mark.long
def test_demo(tmp_path):
    """What scripts/demo.sh runs."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_ascend_dsv41.cli", "demo", "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "demo passed" in done.stdout
    assert "['deepseek-v41']" in done.stdout
    assert "operators: apply_rope=reference" in (tmp_path / "server.log").read_text()  # the startup report


@pytest.mark.long
def test_a_stuck_draft_is_reported(converted, tmp_path):
    """A real server whose draft is useless: right text, one line at ERROR, a gauge."""
    directory = converted("a", "bf16-useless")
    options = ["--quantization", "ascend", "--tokenizer-mode", "deepseek_v41", "--enforce-eager", "--dtype", "float32"]
    options += ["--max-num-seqs", "16", "--max-model-len", "1024"]
    options += ["--speculative-config", '{"method": "dspark", "num_speculative_tokens": 5, "enforce_eager": true}']

    def fetch(path: str, body: dict | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.read().decode()

    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with Server(directory, options, tmp_path / "log", env=environment) as server:
        assert re.search(r"^dsv41:draft_stuck\{.*\} 0\.0", fetch("/metrics"), re.M)
        common = {"model": str(directory), "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        fetch("/v1/completions", {**common, "prompt": [[7, 8, 9 + i] for i in range(16)]})
        metrics = fetch("/metrics")
    assert re.search(r"^dsv41:draft_stuck\{.*\} 1\.0", metrics, re.M)
    assert re.search(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} 0\.0", metrics, re.M)
    assert (tmp_path / "log").read_text().count("the draft is stuck: mean acceptance length 1.00 over 1") == 1
