"""`dsv41 selftest` beside its operators: the processes that it starts, and what it says of those that fail."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.deploy import collectives, device_checks, members

LOUD = """
import os, sys
sys.stderr.write("x" * 300_000)
open(os.environ["DSV41_RESULT"], "w").write("7")
"""


def module(tmp_path, monkeypatch, text, name="member_of_a_test"):
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return name


def run(tmp_path, name, count=2, limit=20):
    return members.run_members(name, ["argument"], [{"NUMBER": str(n)} for n in range(count)], tmp_path, limit)


def test_much_output_blocks_nobody(tmp_path, monkeypatch):
    assert run(tmp_path, module(tmp_path, monkeypatch, LOUD)) == "7"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", r"killed by SIGKILL \(out of memory\?\)"),
        (
            "print('W: a warning'); raise RuntimeError('no such device')",
            "failed: RuntimeError: no such device; its log",
        ),
        ("print('EI0006: peer 3 is gone'); print('frame #0: c10::Error::Error()'); exit(3)", "EI0006: peer 3 is gone"),
        ("import time; print('step 4', flush=True); time.sleep(60)", r"did not finish within 1 s; .*said: step 4"),
    ],
)
def test_why_a_process_failed(tmp_path, monkeypatch, text, said):
    with pytest.raises(members.MemberError, match=said):
        run(tmp_path, module(tmp_path, monkeypatch, text), 1, 1 if "sleep" in text else 20)


def test_a_launchers_variables_are_not_handed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("VLLM_DP_SIZE", "4")
    text = "import os; open(os.environ['DSV41_RESULT'], 'w').write(' '.join(os.environ))"
    said = run(tmp_path, module(tmp_path, monkeypatch, text)).split()
    assert "NUMBER" in said
    assert not {"VLLM_DP_SIZE", "TORCHELASTIC_USE_AGENT_STORE"} & set(said)


def test_processes_end_with_a_killed_parent(tmp_path, monkeypatch):
    text = "import os, time; open(f'{os.environ[\"PIDS\"]}/{os.getpid()}', 'w'); time.sleep(60)"
    name = module(tmp_path, monkeypatch, text)
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    program = (
        "from pathlib import Path; from vllm_ascend_dsv41.deploy.members import run_members;"
        f"run_members({name!r}, [], [{{}}, {{}}], Path({str(tmp_path)!r}), 60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + 30
    while len(pids := os.listdir(tmp_path / "pids")) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while any(os.path.exists(f"/proc/{pid}/stat") and _runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not [pid for pid in pids if _runs(pid)]


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_collectives_of_three_ranks():
    said = collectives.run("cpu", 3)
    assert said.startswith("3 ranks by gloo in groups: 1 of 3; 5 collectives of rank 0 exact; all-reduce of 16 MiB")


def test_groups_are_vllms():
    groups = collectives._groups(16, 8)
    assert groups["tensor-parallel"] == [list(range(8)), list(range(8, 16))]
    assert groups["data-parallel"][3] == [3, 11]
    assert list(collectives._groups(8, 8)) == ["all"]


def test_what_a_check_dies_of_is_its_result(monkeypatch, capsys):
    def dies(device, ranks):
        print("a library's line on standard output")
        raise OSError("no space left on /tmp")

    monkeypatch.setattr("vllm_ascend_dsv41.deploy.selftest.SYSTEM_CHECKS", (dies,))
    monkeypatch.setitem(device_checks.NAMES, dies, "collectives")
    assert main(["selftest", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["checks"] == [{"name": "collectives", "passed": False, "found": "OSError: no space left on /tmp"}]
    assert len(said["operators"]) > 50
    assert main(["selftest", "--quick", "--ranks", "2"]) == 1
    assert "--ranks is for the collectives" in capsys.readouterr().err


@pytest.mark.long
def test_everything_on_the_cpu(capsys):
    assert main(["selftest"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks by gloo" in out
    assert "greedy tokens are the reference's" in out
    assert "2 checks beside them, 0 failed" in out
