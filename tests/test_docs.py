"""The guide: rendered without warnings, in step in both languages, and true of the commands that it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from vllm_ascend_dsv41.cli import _parser
from vllm_ascend_dsv41.deploy import recipe as recipes
from vllm_ascend_dsv41.deploy.commands import split
from vllm_ascend_dsv41.deploy.doctor.checks import CHECKS
from vllm_ascend_dsv41.deploy.doctor.compare import MAY, MUST
from vllm_ascend_dsv41.deploy.serve import Own

ROOT = Path(__file__).parents[1]
PAIRS = [
    ("README.md", "README.zh.md"),
    ("docs/index.md", "docs/zh/index.md"),
    ("docs/deployment.md", "docs/zh/deployment.md"),
    ("docs/quantisation.md", "docs/zh/quantisation.md"),
    ("docs/troubleshooting.md", "docs/zh/troubleshooting.md"),
]
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")


def outline(text: str) -> dict[str, list[object]]:
    """What must be the same in every language: code blocks, levels of headings, shapes of tables, code in their cells,
    and what is generated."""
    prose = FENCE.sub("", text)
    tables = [line for line in prose.splitlines() if line.startswith("|")]
    cells = [re.sub(r"\\\||`[^`]*`", "", line).count("|") for line in tables]
    return {
        "code blocks": FENCE.findall(text),
        "headings": [line.split(" ")[0] for line in prose.splitlines() if line.startswith("#")],
        "table rows": cells,
        "code in tables": [sorted(CODE.findall(line)) for line in tables],
        "code in headings": [CODE.findall(line) for line in prose.splitlines() if line.startswith("#")],
        "lists": [line[:1] for line in prose.splitlines() if re.match(r"[-*] ", line)],
        "tables made": re.findall(r"<!-- made: (.*?) -->", text),
    }


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=[Path(pair[0]).stem for pair in PAIRS])
def test_both_languages_are_in_step(english, chinese):
    one, other = (outline((ROOT / path).read_text(encoding="utf-8")) for path in (english, chinese))
    for what in one:
        assert one[what] == other[what], f"{what} of {english} and {chinese} differ"


def test_a_command_that_only_one_language_has_is_noticed():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    assert outline(text) == outline(text.replace("First", "Zuerst"))
    for before, after in (
        ("--json > doctor.json", "> doctor.json"),
        ("| `proxy` |", "| `route` |"),
        ("## What to", "### What to"),
    ):
        assert outline(text) != outline(text.replace(before, after))


def test_mkdocs_renders_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    for page in ("index.html", "deployment.html", "zh/deployment.html", "zh/troubleshooting.html"):
        assert (tmp_path / page).stat().st_size > 3000
    assert 'id="rotation"' in (tmp_path / "zh/quantisation.html").read_text(encoding="utf-8")


def test_the_image_has_what_the_package_asks_for():
    """All but what vLLM's image brings in its own versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["eval"]]
    names = {re.match(r"[a-z0-9-]+", one).group() for one in wanted} - {"numpy", "safetensors", "tokenizers", "torch"}
    text = (ROOT / "docker/Dockerfile").read_text()
    (installed,) = re.findall(r"pip install --no-cache-dir ((?:[a-z0-9]+ )+)", text)
    assert set(installed.split()) == names


def links(text: str) -> list[str]:
    return [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


@pytest.mark.parametrize("path", sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("*.md")))
def test_links_of_the_readmes_lead_somewhere(path):
    missing = [link for link in links((ROOT / path).read_text(encoding="utf-8")) if link and not (ROOT / link).exists()]
    assert missing == []


def commands() -> list[str]:
    """Every ``dsv41 ...`` line of a code block."""
    found = []
    for path in [*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")]:
        for block in FENCE.findall(path.read_text(encoding="utf-8")):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                words = line.strip().split("  #")[0].split(" > ")[0]
                if words.startswith("dsv41 "):
                    found.append(re.sub(r"\[[^\]]*\]", "", words))
    return sorted(set(found))


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_guide_exist(line):
    words = shlex.split(line.replace("RECIPE", "a3x2"))[1:]
    if words[0] == "serve":
        own = Own.of(words[1:])
        assert "recipe" not in own.values or recipes.load(own.values["recipe"])
        return
    arguments, _ = split(words)
    args = _parser().parse_args(arguments)
    for name in (getattr(args, "recipe", None), *[w for w in getattr(args, "what", []) if not w.endswith(".json")]):
        assert name is None or name == "compare" or recipes.load(name)


def test_troubleshooting_names_checks_that_exist():
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    known = {*CHECKS, "peers", "npu-ping", *(f"same-{part}" for part in (*MUST, *MAY))}
    rows = [
        line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and not line.startswith("| symptom")
    ]
    named = {word for cell in rows for word in CODE.findall(cell) if re.fullmatch(r"[a-z]+(-[a-z]+)*", word)}
    assert named - known == set()
    assert len(named) > 15
