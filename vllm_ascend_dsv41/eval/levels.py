"""One level of a perf run from its requests, and how levels are shown."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Literal

from ..deploy.check.drafts import ACCEPTED, DRAFTS
from ..deploy.launch import table
from . import manifest
from .facts import Metrics, percentiles
from .records import Record
from .text import LOOPS, distinct

Tool = Literal["aisbench", "vllm"]
#: Of the service's prefix cache.
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
COLUMNS = ("mean", "p50", "p90", "p99")


def level_of(
    tool: Tool, concurrency: int, records: Sequence[Record], before: Metrics, after: Metrics, said: Mapping[str, float]
) -> manifest.Level:
    """``before`` and ``after``: /metrics around it; ``said``: what the tool says."""
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


HEAD = (
    *("tool", "at once", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "E2E s"),
    *("tokens/s", "useful", "req/s", "accepted", "cached", "looping", "failed"),
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
