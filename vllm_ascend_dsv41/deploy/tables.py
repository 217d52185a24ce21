"""Tables of the documents that are made from the recipes, between two markers in the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from .launch import text_of
from .plan import plan
from .plan.device import GIB
from .recipe import Recipe, load, names

Language = Literal["en", "zh"]
MARKER = re.compile(r"(<!-- made: (?P<what>[\w-]+(?: [\w-]+)*) -->\n)(?P<text>.*?)(<!-- end -->)", re.DOTALL)
WORDS = {
    "en": {
        "recipe": "recipe", "shape": "shape", "hardware": "hardware", "written": "written for", "run": "what was run",
        "option": "option", "value": "value", "source": "source", "left": "left out", "why": "why",
        "rank": "one rank", "bytes": "GiB", "how": "how", "computed": "computed", "estimated": "estimated",
        "context": "context", "sequences": "sequences at once",
    },
    "zh": {
        "recipe": "配方", "shape": "并行", "hardware": "硬件", "written": "适用版本", "run": "验证情况",
        "option": "选项", "value": "取值", "source": "来源", "left": "未采用", "why": "原因",
        "rank": "单个 rank", "bytes": "GiB", "how": "方式", "computed": "计算", "estimated": "估算",
        "context": "上下文长度", "sequences": "可同时处理的序列数",
    },
}  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines)


def support(language: Language) -> str:
    """Every recipe: shape, hardware, versions, what was run."""
    w = WORDS[language]
    rows = []
    for name in names():
        recipe = load(name)
        versions = ", ".join(f"{package} {version}" for package, version in recipe.written_for.items())
        rows.append((f"`{name}`", recipe.title[language], recipe.shape, versions, recipe.evidence[language]))
    return _table((w["recipe"], w["hardware"], w["shape"], w["written"], w["run"]), rows)


def options(language: Language, recipe: Recipe) -> str:
    """Every option of a recipe with its source."""
    w = WORDS[language]
    rows = [
        (f"`--{name}`" if name in recipe.flags else f"`{name}`", f"`{text_of(item.value)}`", item.source)
        for name, item in recipe.items()
    ]
    text = _table((w["option"], w["value"], w["source"]), rows)
    text += "\n" + _table((w["source"], ""), [(name, why) for name, why in recipe.sources.items()])
    if recipe.left_out:
        left = [(f"`--{name}`", " ".join(why.split())) for name, why in recipe.left_out.items()]
        text += "\n" + _table((w["left"], w["why"]), left)
    return text


def memory(language: Language, recipe: Recipe) -> str:
    """A rank's memory, and how many sequences fit."""
    w, found = WORDS[language], plan(recipe)
    rows = [(part.name, f"{part.bytes / GIB:.2f}", w[part.how]) for part in found.rank]
    text = _table((w["rank"], w["bytes"], w["how"]), rows)
    fits = [(f"{length:,}", str(count)) for length, count in found.limits["sequences_at_context"].items()]
    return text + "\n" + _table((w["context"], w["sequences"]), fits)


MAKERS: dict[str, Callable[[Language, Recipe], str]] = {"options": options, "memory": memory}


def filled(text: str, language: Language) -> str:
    """A document with its tables made anew. Raises ValueError: a marker of no table."""

    def make(match: re.Match[str]) -> str:
        what, _, name = match["what"].partition(" ")
        if what == "support":
            body = support(language)
        elif what in MAKERS:
            body = MAKERS[what](language, load(name))
        else:
            raise ValueError(f"<!-- made: {match['what']} -->: expected support, options RECIPE or memory RECIPE")
        return match[1] + body + match[4]

    return MARKER.sub(make, text)


def documents(root: Path) -> Iterator[tuple[str, str]]:
    """Path and content of each document with such tables."""
    for path in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")]):
        text = path.read_text(encoding="utf-8")
        if "<!-- made: " in text:
            language: Language = "zh" if path.stem.endswith(".zh") or "zh" in path.parent.parts else "en"
            yield str(path.relative_to(root)), filled(text, language)
