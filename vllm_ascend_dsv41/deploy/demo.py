"""``dsv41 demo``: everything this package does, once, on a checkpoint that fits anywhere."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI, OpenAIError

from ..quant import Weights, convert
from ..reference import Checkpoint, Grid, Model, State
from ..tiny_checkpoint import write_talking
from .check import Options, Service, examine
from .doctor.report import failed, text
from .server import Server

SERVED_NAME = "deepseek-v41"
FLAGS = (
    *("--served-model-name", SERVED_NAME),
    *("--tokenizer-mode", "deepseek_v41"),
    *("--reasoning-parser", "deepseek_v41"),
    *("--tool-call-parser", "deepseek_v41"),
    "--enable-auto-tool-choice",
    *("--quantization", "ascend"),
    *("--block-size", "128"),
    *("--max-num-seqs", "8"),
    *("--speculative-config", '{"method": "dspark", "num_speculative_tokens": 5, "enforce_eager": true}'),
    # a tiny model fills the white space that a grammar allows
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
    "--enforce-eager",
)
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
# A served token may differ from the reference's choice where two logits are closer than two implementations of the
# same BF16 and INT8 arithmetic agree: golden/README.md measures 2 for logits with a standard deviation of 3.5.
NEAR_TIE, EQUAL_SHARE = 2.0, 0.8
REQUEST: dict[str, Any] = {
    "model": SERVED_NAME,
    "messages": [{"role": "user", "content": "Who are you?"}],
    "temperature": 0,
    "max_completion_tokens": 256,
}


class DemoError(ValueError):
    """The server's answer is not what it must be."""


@dataclass
class Comparison:
    """Served greedy tokens beside the reference: equal choices, and the largest logit given away."""

    equal: int
    total: int
    worst_gap: float


@contextmanager
def _timed(title: str) -> Iterator[None]:
    print(f"- {title} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"  {time.monotonic() - start:.1f} s", flush=True)


def compare_with_reference(checkpoint: Path, prompt: list[int], served: list[int]) -> Comparison:
    """Run the reference over prompt and served tokens, in the same grid and dtype as the server."""
    model = Model(Checkpoint(checkpoint), grid=Grid.W8A8, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(torch.tensor(prompt + served[:-1]), State()).logits[len(prompt) - 1 :]
    tokens = torch.tensor(served)
    gap = logits.amax(1) - logits.gather(1, tokens[:, None])[:, 0]
    return Comparison(int((logits.argmax(1) == tokens).sum()), len(served), float(gap.max()))


def _text_request(client: OpenAI) -> tuple[list[int], list[int]]:
    answer = client.chat.completions.create(**REQUEST, extra_body={"return_token_ids": True})
    choice = answer.choices[0]
    extra = choice.model_extra or {}
    prompt = (answer.model_extra or {}).get("prompt_token_ids") or []
    tokens = extra.get("token_ids") or []
    if not tokens or answer.usage is None or answer.usage.completion_tokens != len(tokens):
        raise DemoError(f"the text request returned {len(tokens)} token ids, usage {answer.usage}")
    reasoning = (choice.message.model_extra or {}).get("reasoning")
    print(f"  prompt of {len(prompt)} tokens, {len(tokens)} generated, finish reason {choice.finish_reason}")
    print(f"  reasoning: {_short(reasoning)}\n  content:   {_short(choice.message.content)}")
    return prompt, tokens


def _requests(server: Server) -> tuple[list[int], list[int]]:
    """The models, and the text request: its token ids, prompt and answer."""
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)
    with _timed("GET /health: 200; GET /v1/models"):
        names = [model.id for model in client.models.list()]
        if names != [SERVED_NAME]:
            raise DemoError(f"/v1/models lists {names}, expected [{SERVED_NAME!r}]")
        print(f"  {names}")
    with _timed("POST /v1/chat/completions, the guide's text request"):
        answer = _text_request(client)
    return answer


def _check(server: Server) -> None:
    with _timed(f"dsv41 check {server.url}"):
        with closing(Service(server.url, "", 120)) as service:
            results = list(examine(service, Options(words=900)))
        print(text(results, ""))
        if failed(results):
            raise DemoError(f"dsv41 check found faults\n{server.tail()}")


def _short(text: str | None) -> str:
    if not text:
        return "(none)"
    return repr(text if len(text) <= 72 else text[:69] + "...")


def demo(directory: Path | None = None, port: int = 0) -> int:
    """Run the demo; prints what it does. Returns 0; raises ValueError or OSError when anything is off."""
    start = time.monotonic()
    print("dsv41 demo: DeepSeek-V4.1 in tiny sizes, trained to say a few things, served by vLLM on this machine's CPU")
    with tempfile.TemporaryDirectory(prefix="dsv41-demo-") if directory is None else nullcontext(directory) as place:
        root = Path(place)
        root.mkdir(parents=True, exist_ok=True)
        official, converted, log = root / "official", root / "w8a8", root / "server.log"
        with _timed(f"write a checkpoint in the official layout (MXFP4, MXFP8) to {official}"):
            if not (official / "config.json").is_file():
                write_talking(official)
        with _timed(f"dsv41 quantize {official} {converted}"):
            if not converted.exists():
                convert(official, converted, Weights.W8A8)
        with ExitStack() as running:
            with _timed(f"dsv41 serve {converted} {' '.join(FLAGS)}"):
                server = running.enter_context(Server(converted, FLAGS, log, port, ENVIRONMENT))
            try:
                prompt, tokens = _requests(server)
                _check(server)
            except OpenAIError as error:
                raise DemoError(f"a request failed: {error}\n{server.tail()}") from error
        with _timed("compare the served greedy tokens with the reference (same INT8 grid, BF16)"):
            result = compare_with_reference(converted, prompt, tokens)
            print(
                f"  {result.equal} of {result.total} equal, the others within {result.worst_gap:.2f} of the best logit"
            )
        if result.worst_gap > NEAR_TIE or result.equal < EQUAL_SHARE * result.total:
            raise DemoError(
                f"the server and the reference disagree: at least {EQUAL_SHARE:.0%} of the tokens must be equal and "
                f"the others within {NEAR_TIE} of the best logit"
            )
    print(f"demo passed in {time.monotonic() - start:.0f} s on CPU; the server is stopped")
    return 0
