"""``dsv41 eval perf``: AISBench and ``vllm bench serve`` at one concurrency after the other, with real text.

Every prompt is asked once in the whole run, so that no level finds another's prompts in the prefix cache. Times are the
relay's, of every chunk; what the tools say of the same stands beside them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ..deploy.check import Service
from ..deploy.check.drafts import ACCEPTED, DRAFTS
from ..deploy.launch import table
from . import aisbench, configs, datasets, manifest, run
from .aisbench import AISBench
from .chart import chart
from .errors import EvalError
from .facts import Metrics, percentiles
from .records import Record
from .relay import Relay
from .text import LOOPS, distinct, passages, words
from .verdict import Reasons, account, judge_requests

Tool = Literal["aisbench", "vllm"]
TOOLS: tuple[Tool, ...] = ("aisbench", "vllm")
LEVELS, CHART = "levels.csv", "latency-throughput.png"
QUESTION = "Explain in a few sentences what this says:\n\n"
#: Of the service's prefix cache.
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


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
    bench = aisbench.setup() if "aisbench" in options.tools else None
    if "vllm" in options.tools and (find_spec("vllm") is None or find_spec("pandas") is None):
        raise EvalError("vllm bench serve takes vllm and pandas; install them, or pass --tools aisbench")
    unknown: list[str] = []
    reasons, began = Reasons(), run.now()
    with run.opened(options) as service:
        before = run.look(service, options, reasons)
        levels: list[manifest.Level] = []
        end, limit = None, options.max_tokens or 0
        with run.Folder(options.output, "perf") as folder:
            if not reasons.invalid:
                limit = min(run.longest_answer(service, options), options.max_tokens or 256)
                _measure(options, service, bench, prompts, limit, folder, levels, reasons)
                end = run.after(service, before, reasons, unknown)
            made = manifest.Manifest(
                kind="perf",
                **run.common(options, before, end, reasons, unknown, began),
                sampling=run.sampling(options, before, limit),
                dataset=manifest.Dataset(
                    name="text", config=f"{options.prompt_words} words", files=prompts.files, questions=options.total
                ),
                tools=run.tools(bench),
                levels=levels,
                prompts={
                    "words": sum(len(words(text)) for text in prompts.texts) / len(prompts.texts),
                    "distinct_2": distinct(prompts.texts, 2),
                    "distinct_3": distinct(prompts.texts, 3),
                },
            )
            (folder.path / LEVELS).write_text(as_csv(levels), encoding="utf-8")
            if levels:
                chart(levels, folder.path / CHART, made.service.model)
            place = folder.finish(made)
    print(text(made))
    print(f"{place}: manifest, {LEVELS}, {CHART if levels else 'no plot'}, requests, the tools' own files")
    return made


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
        sources.append(manifest.File(path=str(path), sha256=digest, bytes=len(data), rows=rows))
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
    bench: AISBench | None,
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
                if tool == "aisbench" and bench is not None:
                    said = _aisbench(bench, relay, service, options, asked, limit, concurrency, tokenizer, place)
                else:
                    said = _vllm(relay, service, options, asked, limit, concurrency, tokenizer, place)
                level = _level(tool, concurrency, list(records), before, Metrics(service), said)
                levels.append(level)
                _judge(options, service.model, level, list(records), said, reasons)
                taken = time.monotonic() - began
                print(f"  {tool}, {concurrency} at once: {taken:.0f} s", file=sys.stderr, flush=True)


def _aisbench(
    bench: AISBench,
    relay: Relay,
    service: Service,
    options: PerfOptions,
    asked: Sequence[str],
    limit: int,
    concurrency: int,
    tokenizer: Path,
    place: Path,
) -> dict[str, float]:
    settings, questions = place / "config", place / "prompts.jsonl"
    questions.write_text("".join(json.dumps({"question": one, "answer": "-"}) + "\n" for one in asked))
    body = {**options.body, **({"ignore_eos": True} if options.ignore_eos else {})}
    configs.write_model(settings, relay.port, service.model, body, limit, concurrency, tokenizer)
    configs.write_jsonl(settings, "prompts", questions)
    arguments = ["--models", configs.MODEL, "--datasets", datasets.JSONL_CONFIG, "--config-dir", str(settings)]
    arguments += ["--mode", "perf", "--debug", "--num-warmups", "0", "--num-prompts", str(len(asked))]
    aisbench.run(bench, [*arguments, "--work-dir", str(place / "aisbench")], place / "aisbench.log", {})
    try:
        (folder,) = (place / "aisbench").glob(f"*/performances/{configs.MODEL}")
        told = json.loads((folder / "prompts.json").read_text())
        rows = {row["Performance Parameters"]: row for row in csv.DictReader((folder / "prompts.csv").open())}
        return {
            "completed": float(told["Success Requests"]["total"]),
            "output_throughput": _number(told["Output Token Throughput"]["total"]),
            "mean_ttft": _number(rows["TTFT"]["Average"]) / 1000,
            "mean_tpot": _number(rows["TPOT"]["Average"]) / 1000,
            "mean_e2el": _number(rows["E2EL"]["Average"]) / 1000,
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _number(text: str) -> float:
    """``"184.3586 token/s"``, ``"29.3 ms"``."""
    return float(str(text).split()[0])


def _vllm(
    relay: Relay,
    service: Service,
    options: PerfOptions,
    asked: Sequence[str],
    limit: int,
    concurrency: int,
    tokenizer: Path,
    place: Path,
) -> dict[str, float]:
    prompts, result = place / "prompts.jsonl", place / "result.json"
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked))
    command = [sys.executable, "-m", f"{__package__}.vllm_bench", "--backend", "openai-chat"]
    command += ["--endpoint", "/v1/chat/completions", "--base-url", relay.url, "--model", service.model]
    command += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(len(asked))]
    command += ["--max-concurrency", str(concurrency), "--tokenizer", str(tokenizer), "--skip-chat-template"]
    command += ["--custom-output-len", str(limit), "--disable-shuffle", "--no-oversample", "--disable-tqdm"]
    command += ["--extra-body", json.dumps(options.body), "--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--ready-check-timeout-sec", "0", "--save-result", "--result-dir", str(place)]
    command += ["--result-filename", result.name, *(["--ignore-eos"] if options.ignore_eos else [])]
    kept = aisbench.environment({"VLLM_LOGGING_LEVEL": "ERROR"})
    with (place / "vllm.log").open("wb") as log:
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=kept)
    try:
        told = json.loads(result.read_text())
        return {
            "completed": float(told["completed"]),
            "output_throughput": float(told["output_throughput"]),
            **{f"mean_{name}": float(told[f"mean_{name}_ms"]) / 1000 for name in ("ttft", "tpot", "e2el")},
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _level(
    tool: Tool, concurrency: int, records: Sequence[Record], before: Metrics, after: Metrics, said: Mapping[str, float]
) -> manifest.Level:
    done = [record for record in records if record.answered]
    began = min((record.started for record in records), default=0.0)
    duration = max((record.started + record.latency for record in records), default=0.0) - began
    tokens = sum(record.completion_tokens for record in done)
    useful = sum(record.completion_tokens for record in done if record.loops < LOOPS)
    between = [b - a for record in done for a, b in zip(record.times, record.times[1:], strict=False)]

    def grown(name: str) -> float:
        return after.values.get(name, 0.0) - before.values.get(name, 0.0)

    comparable = not (before.several or after.several)
    drafts, queries = grown(DRAFTS), grown(QUERIES)
    return manifest.Level(
        tool=tool,
        concurrency=concurrency,
        requests=len(records),
        failed=len(records) - len(done),
        duration=round(duration, 6),
        request_throughput=round(len(done) / duration, 4) if duration else 0.0,
        output_throughput=round(tokens / duration, 4) if duration else 0.0,
        useful_throughput=round(useful / duration, 4) if duration else 0.0,
        ttft=percentiles([record.first for record in done if record.first is not None]),
        tpot=percentiles([record.per_token for record in done if record.per_token is not None]),
        itl=percentiles(between),
        e2el=percentiles([record.latency for record in done]),
        prompt_tokens=round(sum(record.prompt_tokens for record in done) / max(1, len(done)), 2),
        completion_tokens=round(tokens / max(1, len(done)), 2),
        looping=round(sum(record.loops >= LOOPS for record in done) / max(1, len(done)), 4),
        distinct_2=distinct((record.text for record in done), 2),
        prefix_hits=round(grown(HITS) / queries, 4) if comparable and queries > 0 else None,
        mean_acceptance_length=round(1 + grown(ACCEPTED) / drafts, 4) if comparable and drafts > 0 else None,
        by_tool=dict(said),
    )


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
    counts = account(expected, records, len(records), LOOPS)
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
    reasons.invalid += [f"{name}: {reason}" for reason in mine.invalid]
    reasons.degraded += [f"{name}: {reason}" for reason in mine.degraded]


COLUMNS = ("mean", "p50", "p90", "p99")


def as_csv(levels: Sequence[manifest.Level]) -> str:
    """A line for each level; times in seconds."""
    out = io.StringIO()
    times = ("ttft", "tpot", "itl", "e2el")
    plain = [name for name in manifest.Level.model_fields if name not in (*times, "by_tool")]
    writer = csv.writer(out)
    writer.writerow([*plain, *(f"{name}_{column}" for name in times for column in COLUMNS)])
    for level in levels:
        values = [getattr(level, name) for name in plain]
        cells = [getattr(level, name).get(column) for name in times for column in COLUMNS]
        writer.writerow(["" if value is None else value for value in (*values, *cells)])
    return out.getvalue()


def text(made: manifest.Manifest) -> str:
    """What people read."""
    rows = [("verdict", made.verdict.value.upper()), *(("", reason) for reason in made.reasons)]
    given = made.prompts
    if given.get("distinct_2") is not None:
        rows.append(
            ("prompts", f"{given['words']:.0f} words, {given['distinct_2']:.2f} of their bigrams distinct, each once")
        )
    rows += [("not recorded", missing) for missing in made.unknown]
    lines = [table(rows)]
    if made.levels:
        lines += ["", table([HEAD, *map(_row, made.levels)])]
    return "\n".join(lines)


HEAD = tuple(
    "tool,at once,TTFT ms,p99,TPOT ms,p99,ITL ms,E2E s,tokens/s,useful,req/s,accepted,cached,looping,failed".split(",")
)


def _row(level: manifest.Level) -> tuple[str, ...]:
    def ms(values: Mapping[str, float], name: str = "mean") -> str:
        return f"{1000 * values[name]:.1f}" if values else "-"

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    return (
        level.tool,
        str(level.concurrency),
        ms(level.ttft),
        ms(level.ttft, "p99"),
        ms(level.tpot),
        ms(level.tpot, "p99"),
        ms(level.itl),
        f"{level.e2el['mean']:.2f}" if level.e2el else "-",
        f"{level.output_throughput:.1f}",
        f"{level.useful_throughput:.1f}",
        f"{level.request_throughput:.2f}",
        "-" if level.mean_acceptance_length is None else f"{level.mean_acceptance_length:.2f}",
        share(level.prefix_hits),
        share(level.looping),
        str(level.failed),
    )
