"""Launch scripts as people write them, read for all their nodes without being run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.deploy.doctor.lint import commands, lint, without_output
from vllm_ascend_dsv41.deploy.doctor.report import Status
from vllm_ascend_dsv41.deploy.launch import LaunchError, parse_options

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent / "commands"
GUIDE = ROOT.parent / "shared" / "seeds"  # the guide's text, where it is at hand; it is not ours to keep


def states(path: Path) -> dict[str, Status]:
    return {result.check: result.status for result in lint(str(path))}


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/serve-*.sh")), ids=lambda p: p.stem)
def test_our_own_scripts_pass(script, capsys):
    """A warning is left: placeholders, which every server fills in."""
    assert main(["doctor", "--lint-command", str(script)]) == 0
    out = capsys.readouterr().out
    assert "1 WARN, 0 FAIL" in out
    assert "WARN  placeholders" in out


def test_the_guides_scripts_pass(tmp_path):
    found = sorted(GUIDE.glob("001_*.txt"))
    if not found:
        pytest.skip("the guide's text is not here")
    scripts = found[0].read_text(encoding="utf-8").split("#!/usr/bin/env bash")[1:]
    assert len(scripts) == 2
    for number, text in enumerate(scripts):
        path = tmp_path / f"{number}.sh"
        path.write_text(text.partition("FULL_DECODE_ONLY\"}'")[0] + "FULL_DECODE_ONLY\"}'\n", encoding="utf-8")
        result = states(path)
        assert Status.FAIL not in result.values()
        assert result["tiling"] is Status.PASS
        assert result["remote-code"] is Status.WARN  # the guide trusts remote code, which nothing needs
        assert result["access"] is Status.WARN  # and listens on every network without a key


def test_the_older_form_is_flagged(capsys):
    assert main(["doctor", "--lint-command", str(HERE / "old-start-rank.sh"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = {r["check"]: r for r in report["results"] if r["status"] == "FAIL"}
    assert set(failed) == {"start-rank", "engram"}
    assert "node 0: --data-parallel-start-rank 0" in failed["start-rank"]["found"]
    assert "enable_engram" in failed["engram"]["found"]


def test_arrays_conditions_and_redirections():
    script = (HERE / "arrays.sh").read_text()
    ((words, environment),) = commands(script, 3)
    options = parse_options(words[words.index("serve") + 1 :])
    assert options["model"] == "/data/weights"
    assert options["headless"] is True
    assert options["data-parallel-start-rank"] == "3"
    assert options["data-parallel-address"] == "10.0.0.1"
    assert options["tensor-parallel-size"] == "8"
    assert options["engram-config"] == '{"cpu_offload": false}'
    assert options["speculative-config"] == '{"method": "dspark", "num_speculative_tokens": 5}'
    assert environment["HCCL_SOCKET_IFNAME"] == "enp67s0f5"
    assert environment["TASK_QUEUE_ENABLE"] == "1"
    assert states(HERE / "arrays.sh")["access"] is Status.WARN  # --api-key


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("a > f 2>&1 &", "a   &"),
        ("a >/dev/null", "a "),
        ("a &> 'my file'; b", "a ; b"),
        ('a >> "$LOG"; b', "a ; b"),
        ("a | tee log; b", "a ; b"),
        ("a || b", "a || b"),
        ("a < file", "a "),
        ("x=$(</etc/hostname)", "x=$()"),
        ("a > log_$(date +%F).log", "a "),
        ('a > "$D"/x.log; b', "a ; b"),
        ("exec > >(tee -a log) 2>&1", "exec  "),
        ("((N > 0)) && [[ a > b ]]", "((N > 0)) && [[ a > b ]]"),
        ("x='a > b' y=\"c > d\" # e > f", "x='a > b' y=\"c > d\" # e > f"),
        ("echo 12>f", "echo 12"),
        ("echo it\\'s > f", "echo it\\'s "),
        ("unended ' quote > f", "unended ' quote "),
    ],
)
def test_output_is_taken_out(given, kept):
    assert without_output(given) == kept


@pytest.mark.parametrize(
    "line",
    [
        "numactl -C 0-7 vllm serve /m --seed 1",
        "sudo -E timeout 10 /usr/local/bin/vllm serve /m --seed 1",
        "bash -c 'vllm serve /m --seed 1'",
        "if true; then vllm serve /m --seed 1; exit 0; fi; vllm serve /other",
        "vllm serve /m --seed 1 2>&1 | grep -v INFO",
        "set -u; echo $LD_LIBRARY_PATH; vllm serve /m --seed 1",
        "E=$(cat <<'EOF'\n1\nEOF\n); vllm serve /m --seed \"$E\"",
        "for i in $(seq 1 1); do vllm serve /m --seed $i; done",
        "vllm serve /m \\\r\n  --seed 1\r\n",
        'NODE_RANK="${NODE_RANK:?set it first}"\nvllm serve /m --seed $((NODE_RANK + 1))',
        "command vllm serve /m --seed 1 &",
    ],
)
def test_as_people_start_servers(line):
    ((words, _),) = commands(line, 0)
    assert words == ["vllm", "serve", "/m", "--seed", "1"]


def test_every_command_of_a_script_is_looked_at(tmp_path):
    path = tmp_path / "s.sh"
    path.write_text("vllm serve /a --trust-remote-code > a.log &\nvllm serve /b\n")
    assert states(path)["remote-code"] is Status.WARN
    ((_, environment),) = commands("export VLLM_X=$'a\\tb'\nvllm serve m", 0)
    assert environment["VLLM_X"] == "a\tb"


def test_nothing_is_left_running(tmp_path, monkeypatch):
    path = tmp_path / "s.sh"
    path.write_text("marker=dsv41_left_running\n(while true; do :; done) &\nvllm serve /m\n")
    monkeypatch.setattr(sys.modules[lint.__module__], "TIMEOUT_S", 1)
    assert Status.FAIL not in states(path).values()
    assert "dsv41_left_running" not in subprocess.run(["ps", "-ef"], capture_output=True, text=True, check=False).stdout


def test_nothing_of_a_script_is_done(tmp_path):
    """It is evaluated, not run: no program, no file, no signal."""
    target = tmp_path / "touched"
    script = tmp_path / "evil.sh"
    script.write_text(
        f"kill -9 $PPID\nbuiltin kill -9 $$\n/bin/touch {target}\ncommand touch {target}\nPATH=/bin touch {target}\n"
        f"set +r\neval 'touch {target}'\necho text > {target}\n. {target}\ncd /\nexit 3\n"
        "python3 -c 'open(1)'\nvllm serve /m --data-parallel-size 1\n"
    )
    ((words, _),) = commands(script.read_text(), 0)
    assert words == ["vllm", "serve", "/m", "--data-parallel-size", "1"]
    assert not target.exists()
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo nothing", "no `vllm serve`"),
        ("while true; do :; done", "did not end within"),
        ("if [[ ; then\nvllm serve m", "bash says"),
        ("", "no `vllm serve`"),
        ("vllm bench serve-it", "no `vllm serve`"),
    ],
)
def test_what_cannot_be_read(text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules[lint.__module__], "TIMEOUT_S", 1)
    path = tmp_path / "s.sh"
    path.write_text(text)
    with pytest.raises(LaunchError, match=said):
        lint(str(path))
    assert main(["doctor", "--lint-command", str(path)]) == 1
    assert "dsv41: error" in capsys.readouterr().err


def test_options_that_differ_between_nodes(tmp_path):
    path = tmp_path / "s.sh"
    path.write_text(
        "NODE_RANK=0\nN=$((NODE_RANK * 2))\nvllm serve /m --data-parallel-size 4 --data-parallel-size-local 2 "
        "--max-num-seqs $((16 + NODE_RANK)) $([[ $NODE_RANK == 0 ]] || echo --headless --data-parallel-start-rank $N)\n"
    )
    found = {result.check: result for result in lint(str(path))}
    assert found["same-options"].status is Status.FAIL
    assert "--max-num-seqs differ" in found["same-options"].found
    path.write_text(path.read_text().replace("start-rank $N", "start-rank 1").replace("16 + NODE_RANK", "16"))
    assert {r.check for r in lint(str(path)) if r.status is Status.FAIL} == {"tiling"}
