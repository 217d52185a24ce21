"""``dsv41 doctor --lint-command``: what a launch script would run on each node, without running it.

The script is evaluated by a restricted bash without any program to call, in which ``vllm`` and ``dsv41`` only print
what they were given. So loops, arrays and conditions count as they would on the node.
"""

from __future__ import annotations

import re
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
TIMEOUT_S = 10
MOST_NODES = 64
#: Made before the script is read: programs print what they are told, all others do nothing; what could reach out of
#: the shell is switched off. In restricted mode nothing of it can be undone, and no output can be redirected.
PRELUDE = """
say() {{
    printf '{mark}\\0'; printf '%s\\0' "$@"
    printf '{mark}environment\\0'; declare -px | tr_lines; printf '{mark}end\\0'
}}
tr_lines() {{ local line; while IFS= read -r line; do printf '%s\\0' "$line"; done; }}
serving() {{ local word; for word in "$@"; do [[ $word == serve ]] && {{ say "$@"; return 0; }}; done; return 0; }}
vllm() {{ serving vllm "$@"; }}
dsv41() {{ serving dsv41 "$@"; }}
exec() {{ [[ $# == 0 ]] || "$@"; }}
env() {{
    while [[ $# -gt 0 && ( $1 == *=* || $1 == -* ) ]]; do [[ $1 == *=* ]] && export "${{1?}}"; shift; done
    [[ $# == 0 ]] || "$@"
}}
nohup() {{ "$@"; }}
sudo() {{ "$@"; }}
basename() {{ printf '%s\\n' "${{1##*/}}"; }}
command_not_found_handle() {{ return 0; }}
enable -n kill source . ulimit umask exit trap suspend fc history bind coproc 2>/dev/null
exit() {{ return 0; }}
readonly PATH
set -r
"""


REDIRECTION = re.compile(r"&?>[>|&]?[ \t]*(?:&?[-\w./${}:%+]+|\"[^\"\n]*\"|'[^'\n]*')")
TO_TEE = re.compile(r"\|&?[ \t]*tee\b[^\n;)&]*")
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
        elif not (match := TO_TEE.match(script, at)):
            kept.append(script[at])
            at += 1
            continue
        at = match.end()
    return "".join(kept)


def commands(script: str, rank: int) -> tuple[list[str], dict[str, str], str]:
    """Words of the last ``vllm serve`` or ``dsv41 serve`` that node ``rank`` would run, its environment, and what the
    shell complained about. Raises LaunchError: it does not end, or serves nothing."""
    text = re.sub(
        r"^([ \t]*(?:export[ \t]+|declare[ \t]+-x[ \t]+)?(?:NODE_RANK|node_rank))=\S*",
        rf"\1={rank}",
        script,
        flags=re.MULTILINE,
    )
    text = re.sub(r"(?<!\w)PATH=", "IGNORED_PATH=", text)  # it must stay empty: a prefix would reach programs
    with tempfile.TemporaryDirectory(prefix="dsv41-lint-") as folder:
        body = PRELUDE.format(mark=MARK) + "unset DRY_RUN\nSKIP_DOCTOR=1\n" + without_output(text)
        try:
            done = subprocess.run(
                ["/bin/bash", "--noprofile", "--norc", "-c", body, "launch.sh"],
                cwd=folder,
                env={"PATH": "/nonexistent", "HOME": folder, "NODE_RANK": str(rank), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise LaunchError(f"the script did not end within {TIMEOUT_S} s without its programs") from error
        except (OSError, ValueError) as error:
            raise LaunchError(f"bash cannot read it: {error}") from error
    parts = done.stdout.decode("utf-8", "replace").split(f"{MARK}\0")[1:]
    complaint = " ".join(done.stderr.decode("utf-8", "replace").split())[:300]
    if not parts:
        raise LaunchError(
            f"no `vllm serve` and no `dsv41 serve` for node {rank}" + (f"; bash says: {complaint}" if complaint else "")
        )
    words, _, rest = parts[-1].partition(f"{MARK}environment\0")
    variables = {}
    for line in rest.partition(f"{MARK}end\0")[0].split("\0"):
        match = re.fullmatch(r'declare -\w*x\w* (\w+)="(.*)"', line, re.DOTALL)
        if match and match[1] not in ("PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "LC_ALL", "_"):
            variables[match[1]] = re.sub(r"\\(.)", r"\1", match[2])
    return words.split("\0")[:-1], variables, complaint


def lint(path: str) -> list[Result]:
    """All rules that need nothing but the command, for every node together. Raises LaunchError, OSError."""
    script = Path(path).read_text(encoding="utf-8", errors="replace")
    if "\0" in script:
        raise LaunchError(f"{path}: not a script")
    targets = [_target(script, 0)]
    size, local = targets[0].number("data-parallel-size", 1), targets[0].number("data-parallel-size-local", 1)
    by_ray = targets[0].options.get("data-parallel-backend") == "ray"  # which starts all engines from node 0
    alone = by_ray or "data-parallel-size-local" not in targets[0].options
    nodes = 1 if alone else min(size // max(local, 1), MOST_NODES)
    targets += [_target(script, rank) for rank in range(1, nodes)]
    results = [_merged(name, targets) for name in WORDS_ONLY]
    if nodes > 1:
        results.append(tiling(targets))
    different = same_options([target.options for target in targets])
    results.append(
        bad(
            "same-options",
            f"--{', --'.join(different)} differ between nodes",
            "the same on all",
            "one script for all nodes",
        )
        if different
        else good("same-options", f"{nodes} nodes alike")
    )
    return results


def _target(script: str, rank: int) -> Target:
    words, environment, _ = commands(script, rank)
    return Target(None, Node(rank), parse_options(words[words.index("serve") + 1 :]), environment, given=True)


def _merged(name: str, targets: Sequence[Target]) -> Result:
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
    if result.status in (Status.FAIL, Status.WARN) and len(targets) > 1:
        return Result(name, result.status, f"node {worst}: {result.found}", result.expected, result.remedy)
    return result
