"""``dsv41 doctor --lint-command``: what a launch script would run on each node, without running it.

The script is evaluated by a restricted bash without any program to call, in which ``vllm`` and ``dsv41`` only print
what they were given. So loops, arrays and conditions count as they would on the node.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..launch import LaunchError, Node, parse_options
from .checks.command import CHECKS, WORDS_ONLY, same_options, tiling
from .host import Machine
from .report import Result, Status, bad, good, warn
from .target import Target

MARK = "\x01dsv41"
TIMEOUT_S = 5
MOST_NODES = 64
LARGEST = 1 << 20  # bytes of a script, and of what it makes the shell say
#: Made before the script is read: programs print what they are told, all others do nothing; what could reach out of
#: the shell is switched off. In restricted mode nothing of it can be undone, and no output can be redirected.
PRELUDE = """
ended=
say() {{ # a write for each word, with who says it: a server in the background speaks at the same time
    local id=$BASHPID word line
    for word in "$@"; do printf '{mark}%s:w:%s\\0' "$id" "$word"; done
    declare -px | while IFS= read -r line; do printf '{mark}%s:e:%s\\0' "$id" "$line"; done
    printf '{mark}%s:x:\\0' "$id"
    said=1
}}
serving() {{
    local word
    [[ -z $ended ]] || return 0
    for word in "$@"; do [[ $word == serve ]] && {{ say "$@"; return 0; }}; done
    return 0
}}
vllm() {{ serving vllm "$@"; }}
dsv41() {{ serving dsv41 "$@"; }}
exec() {{ [[ $# == 0 ]] || "$@"; }}
env() {{
    while [[ $# -gt 0 && ( $1 == *=* || $1 == -* ) ]]; do
        [[ $1 != -u && $1 != -C && $1 != -S ]] || shift
        [[ $1 == *=* ]] && export "${{1?}}"
        shift
    done
    [[ $# == 0 ]] || "$@"
}}
before() {{ # numactl -C 0-7 vllm serve ...: what is run stands behind options of its own
    while [[ $# -gt 0 && $1 != vllm && $1 != dsv41 && $1 != bash && $1 != env ]]; do shift; done
    [[ $# == 0 ]] || "$@"
}}
for prefix in nohup sudo numactl taskset timeout nice ionice stdbuf setsid chrt script; do
    eval "$prefix() {{ before \\"\\$@\\"; }}"
done
bash() {{ while [[ $# -gt 0 && $1 == -* && $1 != *c ]]; do shift; done; [[ $# -lt 2 ]] || eval "$2"; }}
sh() {{ bash "$@"; }}
command() {{ [[ $1 == -* ]] || "$@"; }}
basename() {{ printf '%s\\n' "${{1##*/}}"; }}
cat() {{ local line; [[ $# -gt 0 ]] || while IFS= read -r line; do printf '%s\\n' "$line"; done; }}
seq() {{ local i; for ((i = $# > 1 ? $1 : 1; i <= ${{!#}}; i++)); do echo "$i"; done; }}
command_not_found_handle() {{ return 0; }}
enable -n kill source . ulimit umask trap suspend fc history bind coproc 2>/dev/null
exit() {{ [[ -z ${{said-}} ]] || ended=1; return 0; }}
LD_LIBRARY_PATH= PYTHONPATH= LD_PRELOAD=
readonly PATH
set -r
"""


REDIRECTION = re.compile(
    r"&?>[>|&]?[ \t]*(?:>?\([^)\n]*\)|(?:&?[-\w./{}:%+]|\$(?!\()|\$\([^)\n]*\)|\"[^\"\n]*\"|'[^'\n]*')+)"
)
#: Into a pipe: programs that read it are not there. Not the || of a list.
TO_PIPE = re.compile(r"\|&?(?!\|)(?:'[^'\n]*'|\"[^\"\n]*\"|[^\n;)'\"&])*")
FROM_FILE = re.compile(r"(?<!<)<(?![<(&])[ \t]*[^\s;)|&<]+")
#: What is copied as it is: escapes, quotes, comments, conditions, arithmetic.
WHOLE = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|(?<![^\s;(])#[^\n]*|\[\[.*?\]\]|\(\(.*?\)\)|<<<", re.DOTALL)


def without_output(script: str) -> str:
    """A script whose commands write to nothing but standard output: a restricted shell refuses redirections."""
    kept, at = [], 0
    while at < len(script):
        if match := WHOLE.match(script, at):
            kept.append(match[0])
        elif match := REDIRECTION.match(script, at):
            if kept and kept[-1].isdigit() and (len(kept) < 2 or kept[-2].isspace()):
                kept.pop()  # 2>&1: the number belongs to it
        elif script.startswith("||", at):
            kept.append("||")
            at += 2
            continue
        elif not (match := TO_PIPE.match(script, at) or FROM_FILE.match(script, at)):
            kept.append(script[at])
            at += 1
            continue
        at = match.end()
    return "".join(kept)


Command = tuple[list[str], dict[str, str]]


def commands(script: str, rank: int) -> list[Command]:
    """Every ``vllm serve`` and ``dsv41 serve`` that node ``rank`` would run: its words and its environment. Raises
    LaunchError: it does not end, or serves nothing."""
    text = re.sub(
        r"^([ \t]*(?:export[ \t]+|declare[ \t]+-x[ \t]+)?(?:NODE_RANK|node_rank))="
        r"(?:\"[^\"\n]*\"|'[^'\n]*'|\$\([^)\n]*\)|[^\s;]*)",
        rf"\1={rank}",
        script.replace("\r\n", "\n"),
        flags=re.MULTILINE,
    )
    text = re.sub(r"(?<!\w)PATH=", "IGNORED_PATH=", text)  # it must stay empty: a prefix would reach programs
    text = re.sub(r"(?<![\w./-])/[\w./-]*/(vllm|dsv41)(?=\s)", r"\1", text)
    body = PRELUDE.format(mark=MARK) + "unset DRY_RUN\nSKIP_DOCTOR=1\n" + without_output(text) + "\nwait\n"
    said, complaint = _evaluated(body, rank)
    found: list[Command] = []
    open_ones: dict[str, tuple[list[str], list[str]]] = {}
    for item in said.split("\0"):
        match = re.fullmatch(r"(\d+):([wex]):(.*)", item.rpartition(MARK)[2], re.DOTALL) if MARK in item else None
        if match is None:
            continue
        words, lines = open_ones.setdefault(match[1], ([], []))
        if match[2] == "x":
            found.append((words, _variables(lines)))
            del open_ones[match[1]]
        else:
            (words if match[2] == "w" else lines).append(match[3])
    if not found:
        shown = f"; bash says: {complaint}" if complaint else ""
        raise LaunchError(f"no `vllm serve` and no `dsv41 serve` for node {rank}{shown}")
    return found


def _evaluated(body: str, rank: int) -> tuple[str, str]:
    """What a restricted bash says to both streams. Raises LaunchError."""
    with (
        tempfile.TemporaryDirectory(prefix="dsv41-lint-") as folder,
        tempfile.TemporaryFile() as said,
        tempfile.TemporaryFile() as bad,
    ):
        try:
            process = subprocess.Popen(
                ["/bin/bash", "--noprofile", "--norc", "-c", body, "launch.sh"],
                cwd=folder,
                env={"PATH": "/nonexistent", "HOME": folder, "NODE_RANK": str(rank), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=bad,
                start_new_session=True,
                preexec_fn=_bounded,
            )
        except (OSError, ValueError) as error:
            raise LaunchError(f"bash cannot read it: {error}") from error
        late = False
        try:
            process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            late = True  # it may watch the server, and what it started has been said
        finally:  # what it put into the background, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        bad.seek(0)
        text = said.read().decode("utf-8", "replace")
        if late and ":x:" not in text:
            raise LaunchError(f"the script did not end within {TIMEOUT_S} s without its programs")
        return text, " ".join(bad.read().decode("utf-8", "replace").split())[:300]


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * LARGEST, 8 * LARGEST))


def _variables(lines: Sequence[str]) -> dict[str, str]:
    """Of ``declare -px``, without those of every shell."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"declare -\w*x\w* (\w+)=(?:\"(.*)\"|\$'(.*)')", line, re.DOTALL)
        if match and match[1] not in ("PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "LC_ALL", "_"):
            escaped = match[2] if match[2] is not None else match[3].encode().decode("unicode_escape")
            found[match[1]] = re.sub(r"\\(.)", r"\1", escaped) if match[2] is not None else escaped
    return found


def lint(path: str) -> list[Result]:
    """All rules that need nothing but the command, for every node together. Raises LaunchError, OSError."""
    file = Path(path)
    if file.exists() and (not file.is_file() or file.stat().st_size > LARGEST):
        raise LaunchError(f"{path}: expected a script of at most {LARGEST >> 20} MiB")
    script = file.read_text(encoding="utf-8", errors="replace")
    if "\0" in script:
        raise LaunchError(f"{path}: not a script")
    last = [_targets(script, 0)[-1]]
    every = _targets(script, 0)
    size, local = last[0].number("data-parallel-size", 1), last[0].local
    by_ray = last[0].options.get("data-parallel-backend") == "ray"  # which starts all engines from node 0
    alone = by_ray or "data-parallel-size-local" not in last[0].options
    nodes = 1 if alone else min(size // max(local, 1), MOST_NODES)
    for rank in range(1, nodes):
        every += _targets(script, rank)
        last.append(_targets(script, rank)[-1])
    results = [_merged(name, every, nodes) for name in WORDS_ONLY]
    if nodes > 1:
        results.append(tiling(last))
    different = same_options([target.options for target in last])
    results.append(
        bad("same-options", f"--{', --'.join(different)} differ between nodes", "the same on all", "one script for all")
        if different
        else good("same-options", f"{nodes} nodes alike")
    )
    return results


def _targets(script: str, rank: int) -> list[Target]:
    found = []
    for words, environment in commands(script, rank):
        options = parse_options(words[words.index("serve") + 1 :])
        found.append(Target(None, Node(rank), options, environment, given=True))
    return found


def _merged(name: str, targets: Sequence[Target], nodes: int) -> Result:
    """The worst of the nodes' results. A placeholder is what a template has: a warning here, not before a start."""
    order = [Status.FAIL, Status.WARN, Status.PASS, Status.SKIP]
    results = []
    for target in targets:
        try:
            results.append(CHECKS[name](Machine({}), target))
        except LaunchError as error:
            results.append(bad(name, str(error), "an option that can be read", "correct it"))
    worst = min(range(len(results)), key=lambda n: order.index(results[n].status))
    result = results[worst]
    if name == "placeholders" and result.status is Status.FAIL:
        return warn(name, result.found, result.expected, result.remedy)
    if result.status in (Status.FAIL, Status.WARN) and nodes > 1:
        return Result(
            name, result.status, f"node {targets[worst].node.rank}: {result.found}", result.expected, result.remedy
        )
    return result
