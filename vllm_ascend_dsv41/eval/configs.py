"""Config files that AISBench reads: Python, found by name below its --config-dir."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from .datasets import JSONL_CONFIG

MODEL = "dsv41"

MODEL_FILE = """\
from ais_bench.benchmark.models import VLLMCustomAPIChat
from ais_bench.benchmark.utils.postprocess.model_postprocessors import extract_non_reasoning_content

models = [
    dict(
        type=VLLMCustomAPIChat,
        pred_postprocessor=dict(type=extract_non_reasoning_content),
        **{settings!r},
    )
]
"""

# answers are compared letter by letter, without what is white at their ends
JSONL_FILE = """\
from ais_bench.benchmark.datasets import CustomDataset
from ais_bench.benchmark.openicl.icl_evaluator import AccEvaluator
from ais_bench.benchmark.openicl.icl_inferencer import GenInferencer
from ais_bench.benchmark.openicl.icl_prompt_template import PromptTemplate
from ais_bench.benchmark.openicl.icl_retriever import ZeroRetriever

template = dict(round=[dict(role="HUMAN", prompt="{{question}}")])
dsv41_jsonl_datasets = [
    dict(
        type=CustomDataset,
        abbr={name!r},
        path={path!r},
        reader_cfg=dict(input_columns=["question"], output_column="answer"),
        infer_cfg=dict(
            prompt_template=dict(type=PromptTemplate, template=template),
            retriever=dict(type=ZeroRetriever),
            inferencer=dict(type=GenInferencer),
        ),
        eval_cfg=dict(evaluator=dict(type=AccEvaluator)),
    )
]
"""


def write_model(
    folder: Path,
    port: int,
    model: str,
    body: dict[str, Any],
    limit: int,
    concurrency: int,
    tokenizer: Path | None = None,
) -> None:
    """``models/dsv41.py``: the relay as endpoint, without a key. ``body``: options of every request; ``limit``: tokens
    of an answer; with a ``tokenizer`` answers are streamed, as perf runs ask for."""
    settings = {
        "attr": "service",
        "abbr": MODEL,
        "path": str(tokenizer or ""),
        "model": model,
        "stream": tokenizer is not None,
        "request_rate": 0,
        "use_timestamp": False,
        "retry": 1,  # attempts: 0 would send nothing and count all as failed
        "api_key": "",
        "host_ip": "127.0.0.1",
        "host_port": port,
        "url": "",
        "max_out_len": limit,
        "batch_size": concurrency,
        "trust_remote_code": False,
        "generation_kwargs": body,
    }
    _write(folder / "models" / f"{MODEL}.py", MODEL_FILE.format(settings=settings))


def write_jsonl(folder: Path, name: str, path: Path) -> None:
    """``datasets/dsv41_jsonl.py``: a file of lines {"question", "answer"}; the question is the whole message."""
    _write(folder / "datasets" / f"{JSONL_CONFIG}.py", JSONL_FILE.format(name=name, path=str(path)))


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of one word. Both benchmarks want one for perf runs, and take counts from the service's usage."""
    path = folder / "tokenizer"
    path.mkdir(parents=True)
    Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    _write(path / "tokenizer_config.json", json.dumps(settings))
    _write(path / "config.json", json.dumps({"model_type": "gpt2"}))  # vLLM asks for one that it knows
    return path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
