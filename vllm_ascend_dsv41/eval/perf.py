"""``dsv41 eval perf``: AISBench and ``vllm bench serve`` at one concurrency after the other, with real text.

Every prompt is asked once in the whole run, so that no level finds another's prompts in the prefix cache. Times are the
relay's, of every chunk; what the tools say of the same stands beside them.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from ..deploy.check import Service
from . import aisbench, configs, datasets, manifest, run
from .benches import Ask, ask_aisbench, ask_vllm
from .chart import chart
from .errors import EvalError
from .facts import Metrics
from .levels import Tool, as_csv, level_of, text
from .records import Record
from .relay import Relay
from .text import distinct, passages, words
from .verdict import Reasons, account, judge_requests

TOOLS: tuple[Tool, ...] = ("aisbench", "vllm")
MOST_CACHED = 0.5  # of prompt tokens; what is in front of every prompt is a part of that
LEVELS, CHART = "levels.csv", "latency-throughput.png"
QUESTION = "Explain in a few sentences what this says:\n\n"


@dataclass(frozen=True)
class PerfOptions(run.Options):
    """``texts``: files, of lines {"prompt": ...} where they end in .jsonl; none: this package's own sources.
    ``requests``: of a level, at least twice its concurrency."""

    texts: tuple[Path, ...] = ()
    tools: tuple[Tool, ...] = TOOLS
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16)
    requests: int = 16
    prompt_words: int = 400
    ignore_eos: bool = False

    def of_level(self, concurrency: int) -> int:
        """Requests of a level."""
        return max(self.requests, 2 * concurrency)

    @property
    def total(self) -> int:
        """Prompts that are needed."""
        return len(self.tools) * sum(map(self.of_level, self.concurrency))


@dataclass(frozen=True)
class Prompts:
    """What is asked, once each, and the files it comes from."""

    texts: list[str]
    files: list[manifest.File]


def perf(options: PerfOptions) -> manifest.Manifest:
    """Measure, judge, write the run's folder and say what was found. Raises EvalError."""
    prompts = _prompts(options)
    if "vllm" in options.tools and (find_spec("vllm") is None or find_spec("pandas") is None):
        raise EvalError("vllm bench serve takes vllm and pandas; install them, or pass --tools aisbench")
    if find_spec("matplotlib") is None:  # better known before the run
        raise EvalError("matplotlib is missing; pip install 'vllm-ascend-dsv41[eval]'")
    unknown: list[str] = []
    reasons, began = Reasons(), run.now()
    with run.opened(options) as service:
        before = run.look(service, options, reasons)
        levels: list[manifest.Level] = []
        end, limit = None, options.max_tokens or 0
        if not reasons.invalid:
            limit = min(run.longest_answer(service, options), options.max_tokens or 256)
            if "aisbench" in options.tools:
                aisbench.setup()
        with run.Folder(options.output, "perf") as folder:
            if not reasons.invalid:
                _measure(options, service, prompts, limit, folder, levels, reasons)
                sent = sum(level.requests for level in levels)
                end = run.after(service, before, sent, reasons, unknown)
                plot(levels, folder.path / CHART, service.model, unknown)
            made = manifest.Manifest(
                kind="perf",
                **run.common(options, before, end, reasons, unknown, began),
                sampling=run.sampling(options, before, limit, options.ignore_eos),
                dataset=manifest.Dataset(
                    name="text", config=f"{options.prompt_words} words", files=prompts.files, questions=options.total
                ),
                tools={"aisbench": aisbench.version()},
                levels=levels,
                prompts={
                    "words": sum(len(words(text)) for text in prompts.texts) / len(prompts.texts),
                    "distinct_2": distinct(prompts.texts, 2),
                    "distinct_3": distinct(prompts.texts, 3),
                },
            )
            (folder.path / LEVELS).write_text(as_csv(levels), encoding="utf-8")
            place = folder.finish(made)
    print(text(made))
    print(f"{place}: manifest, {LEVELS}, {CHART if levels else 'no plot'}, requests, the tools' own files")
    return made


def plot(levels: list[manifest.Level], path: Path, model: str, unknown: list[str]) -> None:
    """The chart; a run of hours is not lost for it."""
    try:
        chart(levels, path, model.replace("$", "\\$"))
    except Exception as error:  # whatever a plotting library may raise
        unknown.append(f"plot: {type(error).__name__}: {error}")


def _prompts(options: PerfOptions) -> Prompts:
    found: list[str] = []
    sources: list[manifest.File] = []
    prose = ""
    for path in options.texts or tuple(_own_sources()):
        if path.suffix == ".jsonl":
            found += [row["prompt"] for row in datasets.check_jsonl(path.expanduser(), ("prompt",))]
        else:
            try:
                prose += path.expanduser().read_text(encoding="utf-8") + "\n"
            except (OSError, UnicodeDecodeError) as error:
                raise EvalError(f"{path}: {getattr(error, 'strerror', None) or error}; expected UTF-8 text") from error
        data = path.expanduser().read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        rows = sum(1 for line in data.splitlines() if line.strip())
        sources.append(manifest.File(path=path.name, sha256=digest, bytes=len(data), rows=rows))
    found = list(dict.fromkeys(found))  # each once
    missing = options.total - len(found)
    if missing > 0:
        try:
            found += [QUESTION + piece for piece in passages(prose, options.prompt_words, missing)]
        except ValueError as error:
            raise EvalError(f"{error}; pass more --text, or fewer --requests or --prompt-words") from error
    if not options.texts:  # one digest for all of them
        joined = "".join(file.sha256 for file in sources).encode()
        size, rows = sum(file.bytes for file in sources), sum(file.rows for file in sources)
        name = "sources of this package"
        sources = [manifest.File(path=name, sha256=hashlib.sha256(joined).hexdigest(), bytes=size, rows=rows)]
    return Prompts(found[: options.total], sources)


def _own_sources() -> list[Path]:
    """Real text that is on every machine which has this package."""
    root = Path(str(files(__package__))).parent
    return sorted(root.rglob("*.py"))


def _measure(
    options: PerfOptions,
    service: Service,
    prompts: Prompts,
    limit: int,
    folder: run.Folder,
    levels: list[manifest.Level],
    reasons: Reasons,
) -> None:
    records: list[Record] = []
    lock = threading.Lock()

    def keep(record: Record) -> None:
        with lock:
            records.append(record)
            folder.add(record)

    bench = aisbench.setup() if "aisbench" in options.tools else None
    at, tokenizer = 0, configs.write_tokenizer(folder.path)
    with Relay(service.url, options.key, options.timeout, keep) as relay:
        for concurrency in options.concurrency:
            for tool in options.tools:
                count = options.of_level(concurrency)
                asked, at = prompts.texts[at : at + count], at + count
                place = folder.path / f"{tool}-{concurrency}"
                place.mkdir()
                records.clear()
                before, began = Metrics(service), time.monotonic()
                ask = Ask(
                    url=relay.url,
                    port=relay.port,
                    model=service.model,
                    body=options.body,
                    prompts=asked,
                    limit=limit,
                    concurrency=concurrency,
                    ignore_eos=options.ignore_eos,
                    tokenizer=tokenizer,
                    place=place,
                )
                said = ask_aisbench(bench, ask) if tool == "aisbench" and bench is not None else ask_vllm(ask)
                level = level_of(tool, concurrency, list(records), before, Metrics(service), said)
                levels.append(level)
                _judge(options, service.model, level, list(records), said, reasons)
                taken = time.monotonic() - began
                print(f"  {tool}, {concurrency} at once: {taken:.0f} s", file=sys.stderr, flush=True)


def _judge(
    options: PerfOptions,
    model: str,
    level: manifest.Level,
    records: Sequence[Record],
    said: Mapping[str, float],
    reasons: Reasons,
) -> None:
    """Answers that reach their limit are what a perf run asks for; the other rules are those of accuracy runs."""
    mine = Reasons()
    expected = options.of_level(level.concurrency)
    counts = account(expected, records)
    kinds = {kind: count for kind, count in counts.kinds.items() if kind == "failed"}
    judge_requests(replace(counts, kinds=kinds), model, None, 0.0, mine)
    name = f"{level.tool}, {level.concurrency} at once"
    answers = expected - counts.failed
    if not said:
        mine.invalid.append(f"{level.tool} gave no numbers: see its log")
    elif said["completed"] != answers:
        mine.invalid.append(f"{level.tool} counts {said['completed']:.0f} answers, the relay {answers}")
    if level.completion_tokens == 0 and not counts.failed:
        mine.invalid.append("the service counts no tokens (usage)")
    if level.prefix_hits is not None and level.prefix_hits > MOST_CACHED:
        mine.degraded.append(f"{level.prefix_hits:.0%} of the prompts came from the prefix cache: asked before?")
    reasons.invalid += [f"{name}: {reason}" for reason in mine.invalid]
    reasons.degraded += [f"{name}: {reason}" for reason in mine.degraded]
