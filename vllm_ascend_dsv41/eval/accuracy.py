"""``dsv41 eval accuracy``: AISBench asks through the relay, and what it does not look at is accounted for."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..deploy.check import Service
from ..deploy.launch import table
from . import aisbench, configs, datasets, manifest, outputs, run
from .errors import EvalError
from .facts import percentiles
from .records import Record, prompt_key
from .relay import Relay
from .statistics import interval
from .verdict import MOST_UNUSABLE, Accounting, Reasons, account, judge_requests

QUESTIONS = "questions.jsonl"
#: Answers of these kinds are wrong, whatever AISBench found in them: it scores the last number of a thought.
NEVER_RIGHT = ("failed", "unfinished thought", "empty", "not asked")


@dataclass(frozen=True)
class AccuracyOptions(run.Options):
    """``dataset``: a name or a file .jsonl; ``digest``: SHA-256 that its first file must have."""

    dataset: str = "gsm8k"
    data: Path | None = None
    digest: str | None = None
    limit: int | None = None
    concurrency: int = 32
    most_unusable: float = MOST_UNUSABLE


def accuracy(options: AccuracyOptions) -> manifest.Manifest:
    """Ask, judge, write the run's folder and say what was found. Raises EvalError for what is wrong with the options;
    everything that is wrong with the service or the data makes the run invalid."""
    interval(0, 1)  # whether scipy is there is better known before the run
    unknown: list[str] = []
    reasons, began = Reasons(), run.now()
    with run.opened(options) as service:
        before = run.look(service, options, reasons)
        data = _data(options, reasons)
        records: list[Record] = []
        found, end, limit, status = outputs.Outputs(), None, options.max_tokens or 0, 0
        if not reasons.invalid:
            limit = run.longest_answer(service, options, _longest_question(options))
            aisbench.setup()
        with run.Folder(options.output, data.name) as folder:
            if not reasons.invalid:
                status = _ask(options, service, data, limit, folder, records)
                found = outputs.read(folder.path / "aisbench")
                end = run.after(service, before, len(records), reasons, unknown)
            kinds = _kinds(records, found.questions)
            expected = _expected(options, data, found)
            counts = account(expected, records)
            if end is not None:
                error = outputs.last_error(folder.path / "aisbench.log")
                _judge(options, data, found, counts, before.service.model, status, error, reasons)
                _judge_sent(options, records, limit, reasons)
                if _data(options, Reasons()).files != data.files:
                    reasons.invalid.append("the data set was changed during the run")
            made = manifest.Manifest(
                kind="accuracy",
                **run.common(options, before, end, reasons, unknown, began),
                sampling=run.sampling(options, before, limit),
                dataset=manifest.Dataset(
                    name=data.name,
                    config=data.config,
                    files=list(data.files),
                    questions=expected,
                    limit=options.limit,
                    prompt_version=_one(found.versions.values()),
                ),
                tools={"aisbench": aisbench.version()},
                requests=_requests(counts, records),
                score=_score(found, kinds),
            )
            _write_questions(folder.path / QUESTIONS, found, kinds)
            place = folder.finish(made)
    print(text(made))
    print(f"{place}: manifest, requests, questions, AISBench's own files")
    return made


def _data(options: AccuracyOptions, reasons: Reasons) -> datasets.Data:
    try:
        data = datasets.find(options.dataset, options.data)
    except EvalError as error:
        if options.dataset not in datasets.KNOWN and not options.dataset.endswith(".jsonl"):
            raise
        reasons.invalid.append(str(error))
        return datasets.Data(Path(options.dataset).stem, "", None, (), None, None)
    if options.digest and data.files[0].sha256 != options.digest.lower():
        reasons.invalid.append(f"{data.files[0].path}: SHA-256 {data.files[0].sha256}; expected {options.digest}")
    return data


def _longest_question(options: AccuracyOptions) -> int:
    """Bytes, which are no fewer than its tokens; 0 for AISBench's own sets, which are short."""
    if not options.dataset.endswith(".jsonl"):
        return 0
    rows = datasets.check_jsonl(Path(options.dataset).expanduser())
    return max(len(row["question"].encode()) for row in rows) + 512  # what the encoder adds


def _ask(
    options: AccuracyOptions,
    service: Service,
    data: datasets.Data,
    limit: int,
    folder: run.Folder,
    records: list[Record],
) -> int:
    """AISBench's exit status, for what it is worth."""
    bench, lock = aisbench.setup(), threading.Lock()

    def keep(record: Record) -> None:
        with lock:
            record.text = ""
            records.append(record)
            folder.add(record)

    settings, work = folder.path / "config", folder.path / "aisbench"
    with Relay(service.url, options.key, options.timeout, keep) as relay:
        configs.write_model(settings, relay.port, service.model, options.body, limit, options.concurrency)
        if data.root is None:
            configs.write_jsonl(settings, data.name, Path(options.dataset).expanduser().absolute())
        arguments = ["--models", configs.MODEL, "--datasets", data.config, "--config-dir", str(settings)]
        # --debug: one process at a time, without a screen that may hang; --merge-ds: the parts of a set by one of them;
        # no warm-up: every request is a question
        arguments += ["--mode", "all", "--dump-eval-details", "--debug", "--merge-ds", "--num-warmups", "0"]
        arguments += ["--work-dir", str(work)]
        if options.limit is not None:
            arguments += ["--num-prompts", str(options.limit)]
        environment = {} if data.root is None else {datasets.CACHE: str(data.root)}
        return aisbench.run(bench, arguments, folder.path / "aisbench.log", environment)


Kinds = dict[tuple[str, int], str]


def _kinds(records: Sequence[Record], questions: Sequence[outputs.Question]) -> Kinds:
    """What became of the request of each question. Questions with the same prompt are told apart by their answers."""
    by_prompt: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_prompt[record.key].append(record)
    found = {}
    for question in sorted(questions, key=lambda question: not question.reply):  # those that failed take what is left
        asked = by_prompt[question.key]
        same = [record for record in asked if record.answered and record.reply == question.reply]
        mine = (same or [record for record in asked if not record.answered] or asked)[:1]
        for record in mine:
            asked.remove(record)
        found[question.part, question.number] = mine[0].kind if mine else "not asked"
    return found


def _expected(options: AccuracyOptions, data: datasets.Data, found: outputs.Outputs) -> int:
    """``--limit`` counts within each part of a set of several."""
    seen = len(found.questions)
    if data.questions is None:
        return seen
    if options.limit is None:
        return data.questions
    parts = max(1, len({question.part for question in found.questions}))
    return min(data.questions, options.limit) if parts == 1 else seen


def _judge(
    options: AccuracyOptions,
    data: datasets.Data,
    found: outputs.Outputs,
    counts: Accounting,
    model: str,
    status: int,
    error: str,
    reasons: Reasons,
) -> None:
    judge_requests(counts, model, options.effort is not None, options.most_unusable, reasons)
    if status != 0:
        reasons.invalid.append(f"AISBench ended with status {status}{error}; see aisbench.log")
    reasons.invalid += found.faults
    empty = [name for name, value in found.cells.items() if value is None]
    if empty:
        reasons.invalid.append(f"the summary has no number for {', '.join(empty)}{error}")
    judged = len(found.questions)
    if judged < counts.expected:
        reasons.invalid.append(f"AISBench judged {judged} of {counts.expected} questions")
    if found.failed and not counts.failed:
        reasons.invalid.append(f"AISBench counts {found.failed} failed requests that the relay saw answered")
    if data.whole and data.questions not in (None, data.whole):
        reasons.degraded.append(f"{data.name} has {data.questions} questions; {data.whole} were published")


def _judge_sent(options: AccuracyOptions, records: Sequence[Record], limit: int, reasons: Reasons) -> None:
    """Whether what was sent is what the manifest says."""
    wanted = {**options.body, "max_tokens": limit}
    other = sum(any(record.asked.get(name) != value for name, value in wanted.items()) for record in records)
    if other:
        reasons.invalid.append(f"{other} requests had other options than {wanted}: does the data set set its own?")
    if options.dataset.endswith(".jsonl"):
        rows = datasets.check_jsonl(Path(options.dataset).expanduser())[: options.limit]
        mine = Counter(prompt_key([{"role": "user", "content": row["question"]}]) for row in rows)
        if missing := mine - Counter(record.key for record in records):
            reasons.invalid.append(f"{missing.total()} questions were not sent as they are in {options.dataset}")


def _score(found: outputs.Outputs, kinds: Kinds) -> manifest.Score | None:
    values = [value for value in found.cells.values() if value is not None]
    if not values or not found.questions:
        return None
    total, right = len(found.questions), found.right
    value = sum(values) / len(values)
    low = high = None
    if right is not None:
        right = sum(bool(q.right) and kinds[q.part, q.number] not in NEVER_RIGHT for q in found.questions)
        value, (low, high) = 100 * right / total, (100 * end for end in interval(right, total))
    return manifest.Score(
        metric="accuracy" if "accuracy" in found.metrics.values() else _one(found.metrics.values()) or "accuracy",
        value=round(value, 4),
        right=right,
        questions=total,
        low=None if low is None else round(low, 4),
        high=None if high is None else round(high, 4),
        parts={name: cell for name, cell in found.cells.items() if cell is not None},
    )


def _one(values: Iterable[str]) -> str | None:
    """What they all are, or all that they are."""
    return ", ".join(sorted(set(values))) or None


def _requests(counts: Accounting, records: Sequence[Record]) -> manifest.Requests:
    return manifest.Requests(
        expected=counts.expected,
        asked=counts.asked,
        complete=counts.kinds.get("complete", 0),
        failed=counts.failed,
        cut=counts.kinds.get("cut", 0),
        unfinished_thoughts=counts.kinds.get("unfinished thought", 0),
        empty=counts.kinds.get("empty", 0),
        looping=counts.looping,
        end_of_thought_in_content=counts.leaked,
        prompt_tokens=sum(record.prompt_tokens for record in records),
        completion_tokens=sum(record.completion_tokens for record in records),
        latency_s=percentiles([record.latency for record in records if record.answered]),
        errors=list(counts.errors),
    )


def _write_questions(path: Path, found: outputs.Outputs, kinds: Kinds) -> None:
    """A line each: what a paired comparison needs."""
    with path.open("w", encoding="utf-8") as stream:
        for question in found.questions:
            kind = kinds[question.part, question.number]
            right = None if question.right is None else bool(question.right) and kind not in NEVER_RIGHT
            stream.write(json.dumps({**asdict(question), "right": right, "kind": kind}) + "\n")


def text(made: manifest.Manifest) -> str:
    """What people read."""
    requests, score = made.requests, made.score
    rows = [("verdict", made.verdict.value.upper())]
    rows += [("", reason) for reason in made.reasons]
    if score is not None:
        counted = f" ({score.right} of {score.questions})" if score.right is not None else f" of {score.questions}"
        bounds = f", 95 % interval {score.low:.2f} to {score.high:.2f}" if score.low is not None else ""
        rows.append((score.metric, f"{score.value:.2f}{counted}{bounds}"))
    if requests is not None:
        kinds = ("complete", "cut", "unfinished_thoughts", "empty", "failed")
        counts = ", ".join(f"{getattr(requests, kind)} {kind.replace('_', ' ')}" for kind in kinds)
        rows.append(("requests", f"{counts}, of {requests.expected}"))
    rows.append(("data", f"{made.dataset.name}, {', '.join(file.sha256[:12] for file in made.dataset.files[:3])}"))
    rows.append(("effort", f"{made.effort.asked}, in the prompt {made.effort.in_prompt or 'none'}"))
    sampled = made.sampling
    rows.append(
        (
            "sampling",
            f"temperature {sampled.temperature:g}, top-p {sampled.top_p:g}, seed {sampled.seed}, "
            f"{sampled.max_tokens} tokens at most",
        )
    )
    if made.draft.mean_acceptance_length is not None:
        rows.append(("drafts", f"mean acceptance length {made.draft.mean_acceptance_length:.2f}"))
    rows += [("not recorded", missing) for missing in made.unknown]
    return table(rows)
