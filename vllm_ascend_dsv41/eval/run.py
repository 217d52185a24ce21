"""What accuracy and perf runs have in common: options, what is looked at before and after, the run's folder."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
from openai import APIStatusError, OpenAIError

from ..deploy.check import Service
from ..versions import versions
from . import facts, manifest
from .errors import EvalError
from .records import Record
from .verdict import Reasons, judge_server

REQUESTS = "requests.jsonl"
HELLO = "What is 17*19?"  # the question whose encoding is recorded
FINISHED = "vllm:request_success_total"
OWN = 1  # requests of the look itself
RESERVE = 16384  # tokens of the context kept for the prompt


@dataclass(frozen=True)
class Options:
    """Of both kinds of run. ``effort``: None turns thinking off; ``command``: as it was typed, for the record."""

    url: str
    model: str | None = None
    key: str = ""
    timeout: float = 7200.0
    effort: int | None = 50
    temperature: float = 1.0
    top_p: float = 0.95
    seed: int | None = 1234
    max_tokens: int | None = None
    output: Path = Path("eval-runs")
    checkpoint: Path | None = None
    startup_report: Path | None = None
    image_digest: str | None = None
    command: tuple[str, ...] = ()

    @property
    def template(self) -> dict[str, Any]:
        """How each request sets thinking, explicitly: the server's default is effort 50."""
        if self.effort is None:
            return {"chat_template_kwargs": {"thinking": False}}
        return {"chat_template_kwargs": {"thinking": True, "reasoning_effort": self.effort}}

    @property
    def body(self) -> dict[str, Any]:
        """Options of every request."""
        seed = {} if self.seed is None else {"seed": self.seed}
        return {"temperature": self.temperature, "top_p": self.top_p, **seed, **self.template}


@dataclass
class Look:
    """The service before the run, and what it serves."""

    service: manifest.Service
    checkpoint: manifest.Checkpoint = field(default_factory=manifest.Checkpoint)
    report: dict[str, Any] | None = None
    defaults: dict[str, Any] | None = None
    encoder: manifest.Encoder = field(default_factory=lambda: manifest.Encoder(question=HELLO))
    metrics: facts.Metrics | None = None


def look(service: Service, options: Options, reasons: Reasons) -> Look:
    """What is there before anything is asked; what is not as it must be makes the run invalid. Raises EvalError for
    files that the options name and that cannot be read."""
    found = Look(manifest.Service(url=service.url, model=options.model or ""))
    found.report = facts.startup_report(options.startup_report)
    try:
        ids = [str(model.id) for model in service.models]
        metrics = found.metrics = facts.Metrics(service)
        found.service = facts.service_facts(service, metrics)
    except APIStatusError as error:  # not its text, which may repeat the key
        reasons.invalid.append(f"{service.url}: /v1/models: {error.status_code} (a key: DSV41_API_KEY)")
        return found
    except (OpenAIError, httpx.HTTPError, ValueError, TypeError, AttributeError) as error:
        reasons.invalid.append(f"{service.url} cannot be reached: {error.__cause__ or error}")
        return found
    if service.model not in ids:
        reasons.invalid.append(f"{service.url} serves {', '.join(ids) or 'no model'}; asked was {service.model}")
        return found
    path = options.checkpoint or _readable(found.service.root)
    found.checkpoint, found.defaults = facts.checkpoint_facts(path), facts.server_defaults(path)
    root = found.service.root
    if options.checkpoint and root and _readable(root) and not options.checkpoint.samefile(root):
        reasons.invalid.append(f"{service.url} serves {root}, not {options.checkpoint}")
    if found.report and root and found.report.get("model") not in (None, root):
        reasons.invalid.append(f"the startup report is of {found.report['model']}; {service.url} serves {root}")
    found.encoder = facts.encoder_facts(service, found.checkpoint, options.template, HELLO)
    in_prompt = facts.effort_in(found.encoder.text)
    if found.encoder.text is not None and in_prompt != options.effort:
        reasons.invalid.append(f"the service encodes effort {in_prompt or 'off'}; asked was {options.effort or 'off'}")
    return found


def _readable(root: str | None) -> Path | None:
    path = Path(root) if root else None
    return path if path is not None and (path / "config.json").is_file() else None


def longest_answer(service: Service, options: Options, prompt: int = 0) -> int:
    """Tokens that an answer may have: those asked for, or what the context leaves beside a prompt of ``prompt``
    tokens at most, or 16,384."""
    if options.max_tokens is not None:
        return options.max_tokens
    if service.longest is None:
        raise EvalError(f"{service.url} does not tell its context (max_model_len); pass --max-tokens")
    return max(1, service.longest - max(prompt, min(RESERVE, service.longest // 4)))


class Folder:
    """A run's folder: hidden while the run goes on, under its name when the manifest is in it."""

    def __init__(self, output: Path, name: str) -> None:
        self._output, self._stem = output.expanduser().absolute(), f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"

    def __enter__(self) -> Folder:
        try:
            self._output.mkdir(parents=True, exist_ok=True)
            for number in range(1000):
                self.name = self._stem if number == 0 else f"{self._stem}.{number}"
                self.path = self._output / f".{self.name}.partial"
                if not (self._output / self.name).exists():
                    with contextlib.suppress(FileExistsError):  # of another run
                        self.path.mkdir()
                        break
            self.requests = (self.path / REQUESTS).open("w", encoding="utf-8")
        except OSError as error:
            raise EvalError(f"{self._output}: {error.strerror}; name another folder by --output") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.requests.close()
        if kind is not None:
            print(f"dsv41: {self.path} keeps what was done; the run has no manifest", file=sys.stderr)

    def add(self, record: Record) -> None:
        """A line of requests.jsonl, at once."""
        self.requests.write(json.dumps(record.as_json()) + "\n")
        self.requests.flush()

    def finish(self, made: manifest.Manifest) -> Path:
        """Write the manifest and give the folder its name."""
        manifest.write(made, self.path / manifest.NAME)
        final = self._output / self.name
        self.path.rename(final)
        return final


def after(service: Service, before: Look, sent: int, reasons: Reasons, unknown: list[str]) -> facts.Metrics:
    """Look again: the same server, the same model, and nobody else's requests beside the ``sent`` ones."""
    found = facts.Metrics(service)
    if before.metrics is None or not before.metrics.values:
        unknown.append("health of the server during the run: it has no /metrics")
    elif before.metrics.several or found.several:
        unknown.append("restarts and acceptance: /metrics comes from several processes in turn")
    else:
        judge_server(before.metrics.values, found.values, reasons)
        others = found.values.get(FINISHED, 0.0) - before.metrics.values.get(FINISHED, 0.0) - sent - OWN
        if others > 0:
            reasons.degraded.append(
                f"{others:.0f} requests of others ran meanwhile: speeds and acceptance are theirs, too"
            )
    try:
        listed = next((model for model in service.client.models.list() if model.id == service.model), None)
        root = (listed.model_extra or {}).get("root") if listed is not None else None
        if listed is None or root != before.service.root:
            reasons.invalid.append(f"{service.url} no longer serves {service.model} from {before.service.root}")
    except (OpenAIError, httpx.HTTPError, ValueError, TypeError, AttributeError):
        reasons.invalid.append(f"{service.url} no longer answers: the server ended during the run")
    return found


def common(
    options: Options, before: Look, end: facts.Metrics | None, reasons: Reasons, unknown: list[str], began: datetime
) -> dict[str, Any]:
    """Fields of a manifest that both kinds of run have."""
    report = before.report
    absent = {
        "checkpoint: pass --checkpoint DIR": before.checkpoint.path is None,
        "prompt encoder: the service does not tell token ids": before.encoder.token_ids is None,
        "effort in the prompt: the service does not decode token ids": before.encoder.text is None,
        "topology, Engram mode and the server's versions: pass --startup-report FILE": report is None,
        "image: pass --image-digest": options.image_digest is None,
    }
    draft = facts.draft_facts(before.metrics, end, report) if before.metrics and end else manifest.Draft()
    return {
        "verdict": reasons.verdict,
        "reasons": [*reasons.invalid, *reasons.degraded],
        "unknown": [*unknown, *(text for text, missing in absent.items() if missing)],
        "began": began.isoformat(timespec="seconds"),
        "ended": now().isoformat(timespec="seconds"),
        "host": facts.host_facts(),
        "command": list(options.command),
        "service": before.service,
        "checkpoint": before.checkpoint,
        "encoder": before.encoder,
        "effort": manifest.Effort(asked=options.effort or "off", in_prompt=facts.effort_in(before.encoder.text)),
        "draft": draft,
        "topology": (report or {}).get("parallel"),
        "engram": [str(one) for one in report.get("engram", ())] if report else None,
        "startup_report": report,
        "versions": versions(),
        "image_digest": options.image_digest,
    }


def sampling(options: Options, before: Look, limit: int, ignore_eos: bool = False) -> manifest.Sampling:
    """As requests say it."""
    return manifest.Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        max_tokens=limit,
        ignore_eos=ignore_eos,
        server_defaults=before.defaults,
    )


def now() -> datetime:
    """With the zone."""
    return datetime.now(timezone.utc)


def opened(options: Options) -> contextlib.closing[Service]:
    """The service as the checks talk to it. Raises AddressError."""
    return contextlib.closing(Service(options.url, options.key, min(options.timeout, 300.0), options.model))
