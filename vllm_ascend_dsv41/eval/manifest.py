"""What a run was: everything that a number needs beside it, as one JSON file.

The models below are the schema: ``python -m vllm_ascend_dsv41.eval.manifest`` writes manifest.schema.json from them.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import EvalError
from .verdict import Verdict

SCHEMA_VERSION = 1
NAME, SCHEMA = "manifest.json", "manifest.schema.json"


class Part(BaseModel):
    """No other fields than those that are named."""

    model_config = ConfigDict(extra="forbid")


class Service(Part):
    """Who answered."""

    url: str
    model: str = Field(description="id that was asked")
    root: str | None = Field(default=None, description="path that the service says it serves")
    max_model_len: int | None = None
    vllm: str | None = Field(default=None, description="GET /version")
    started: float | None = Field(default=None, description="seconds since 1970, of the process, by /metrics")


class Checkpoint(Part):
    """What was served, as far as this machine can read it."""

    path: str | None = None
    digests: dict[str, str] = Field(default_factory=dict, description="SHA-256, 16 digits, of small files; of weights")
    weights: str | None = Field(default=None, description="W8A8, BF16 or MX")
    engram: str | None = Field(default=None, description="INT8, BF16 or FP8")
    shards: int | None = None
    bytes: int | None = None


class Encoder(Part):
    """How a question becomes tokens, shown by one."""

    question: str
    token_ids: list[int] | None = Field(default=None, description="by the service, at the run's own effort")
    text: str | None = Field(default=None, description="the same, decoded by the service")
    module_sha256: str | None = Field(default=None, description="of vLLM's encoder on this machine")
    tokenizer_sha256: str | None = Field(default=None, description="of the checkpoint's tokenizer.json")


class Effort(Part):
    """Reasoning."""

    asked: int | Literal["off"]
    in_prompt: int | None = Field(default=None, description="as the encoded prompt has it")


class Sampling(Part):
    """As each request says it; what is not said is the server's default."""

    temperature: float
    top_p: float
    seed: int | None
    max_tokens: int
    ignore_eos: bool = False
    server_defaults: dict[str, Any] | None = Field(default=None, description="generation_config.json of the checkpoint")


class File(Part):
    """One data file."""

    path: str
    sha256: str
    bytes: int
    rows: int


class Dataset(Part):
    """What was asked."""

    name: str
    config: str = Field(description="of AISBench, or of this package")
    files: list[File]
    questions: int = Field(description="that were to be asked")
    limit: int | None = None
    prompt_version: str | None = Field(default=None, description="AISBench's digest of the prompt, not of the data")


class Draft(Part):
    """Speculative decoding, by /metrics before and after."""

    method: str | None = None
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_per_position: list[int] | None = None
    mean_acceptance_length: float | None = None


class Requests(Part):
    """What became of the requests."""

    expected: int
    asked: int
    complete: int
    failed: int
    cut: int
    unfinished_thoughts: int
    empty: int
    looping: int
    end_of_thought_in_content: int
    prompt_tokens: int
    completion_tokens: int
    latency_s: dict[str, float] = Field(description="mean, p50, p99, max")
    errors: list[str]


class Score(Part):
    """Accuracy, in per cent."""

    metric: str
    value: float
    right: int | None = Field(default=None, description="questions; None where AISBench does not say which")
    questions: int
    low: float | None = Field(default=None, description="Wilson's interval at 95 %")
    high: float | None = None
    parts: dict[str, float] = Field(default_factory=dict, description="of each summary row")


class Level(Part):
    """One run of one tool at one concurrency. Times in seconds; ``by_tool``: what the tool says of the same."""

    tool: Literal["aisbench", "vllm"]
    concurrency: int
    requests: int
    failed: int
    duration: float
    request_throughput: float
    output_throughput: float = Field(description="tokens per second, of all answers")
    useful_throughput: float = Field(description="of answers that do not repeat themselves")
    ttft: dict[str, float]
    tpot: dict[str, float]
    itl: dict[str, float]
    e2el: dict[str, float]
    prompt_tokens: float = Field(description="mean")
    completion_tokens: float
    looping: float = Field(description="share of answers")
    distinct_2: float | None = Field(default=None, description="distinct bigrams of the answers among all")
    prefix_hits: float | None = Field(default=None, description="share of prompt tokens from the prefix cache")
    mean_acceptance_length: float | None = None
    by_tool: dict[str, float]


class Manifest(Part):
    """One run."""

    schema_version: Literal[1] = 1
    kind: Literal["accuracy", "perf"]
    verdict: Verdict
    reasons: list[str]
    unknown: list[str] = Field(default_factory=list, description="what could not be recorded, and why")
    began: str
    ended: str
    host: dict[str, str]
    command: list[str]
    service: Service
    checkpoint: Checkpoint
    encoder: Encoder
    effort: Effort
    sampling: Sampling
    dataset: Dataset
    draft: Draft
    topology: dict[str, Any] | None = None
    engram: list[str] | None = Field(default=None, description="tables, and where they lie, by the startup report")
    startup_report: dict[str, Any] | None = None
    versions: dict[str, str] = Field(description="on this machine; those of the server are in the startup report")
    image_digest: str | None = None
    tools: dict[str, str]
    requests: Requests | None = None
    score: Score | None = None
    levels: list[Level] = Field(default_factory=list)
    prompts: dict[str, float | None] = Field(default_factory=dict, description="of a perf run: diversity and length")


def write(manifest: Manifest, path: Path) -> None:
    """Under its name only when complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps(manifest.model_dump(), indent=1, ensure_ascii=False) + "\n"
    partial.write_bytes(text.encode("utf-8", "replace"))  # half surrogate pairs of arguments and answers
    partial.replace(path)


def read(path: Path) -> Manifest:
    """A manifest, or the one in a run's directory. Raises EvalError."""
    file = path / NAME if path.is_dir() else path
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except OSError as error:
        raise EvalError(f"{file}: {error.strerror}; name a run's directory or its {NAME}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise EvalError(f"{file}: {where}: {first['msg']}; expected a manifest of schema {SCHEMA_VERSION}") from error


def schema() -> str:
    """The JSON Schema of a manifest."""
    return json.dumps(Manifest.model_json_schema(mode="serialization"), indent=1) + "\n"


if __name__ == "__main__":
    Path(str(files(__package__).joinpath(SCHEMA))).write_text(schema())
    sys.exit(0)
