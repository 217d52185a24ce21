"""Every failure that the doctor knows makes exactly its check fail, on a server on which all else is well."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from deploy.faults import DOMINO, FAULTS
from deploy.nodes import GIB, Recorded, hccn, healthy, launched, npu_smi
from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.deploy.doctor import checks, examine
from vllm_ascend_dsv41.deploy.doctor.checks import software
from vllm_ascend_dsv41.deploy.doctor.checks.devices import dies
from vllm_ascend_dsv41.deploy.doctor.compare import compare, facts
from vllm_ascend_dsv41.deploy.doctor.host import Output
from vllm_ascend_dsv41.deploy.doctor.report import Status, text
from vllm_ascend_dsv41.deploy.doctor.target import Target
from vllm_ascend_dsv41.deploy.launch import command

STACK = {"vllm": "0.30.0", "vllm-ascend": "0.30.0rc2", "torch": "2.10.0", "torch-npu": "2.10.0.post4"}
HERE = {"checkpoint"}  # tested with real directories below


@pytest.fixture(autouse=True)
def stack(monkeypatch):
    """The packages of the recipe, as if installed."""
    found = dict(STACK)
    monkeypatch.setattr(software, "installed", found.get)
    return found


def states(node: Recorded, target: Target) -> dict[str, Status]:
    """By check, without the checkpoint's."""
    return {r.check: r.status for r in examine(node, target) if r.check not in HERE}


@pytest.mark.parametrize(("recipe", "rank"), [("a3x2", 0), ("a3x2", 1), ("a2x4", 0), ("a2x4", 3), ("a3x1-offload", 0)])
def test_a_healthy_server(recipe, rank):
    found = examine(healthy(recipe, rank), launched(recipe, rank))
    assert {r.check: r.found for r in found if r.status in (Status.FAIL, Status.WARN) and r.check not in HERE} == {}
    skipped = {r.check for r in found if r.status is Status.SKIP}
    assert len(skipped) <= (7 if recipe == "a3x1-offload" else 3), skipped


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{f[0]}-{f[1]}-{n}" for n, f in enumerate(FAULTS)])
def test_a_fault_is_seen_by_its_check_and_by_no_other(fault):
    _, check, status, said, remedy, change = fault
    recipe = getattr(change, "recipe", "a3x2")
    target = change(healthy(recipe))
    node = healthy(recipe, target.node.rank)
    target = change(node)
    found = {r.check: r for r in examine(node, target) if r.check not in HERE}
    assert found[check].status is status, found[check]
    assert said in found[check].found
    assert remedy in found[check].remedy or remedy in found[check].expected
    others = {name: r for name, r in found.items() if r.status in (Status.FAIL, Status.WARN) and name != check}
    if check == "recipe":
        others = {name: r for name, r in others.items() if name not in DOMINO}
    assert others == {}


def test_every_failure_of_the_spec_has_a_fixture():
    """Of spec 3.3: those that need no NPU, and those that a tool's answer shows. 4 both ways and 26: test_peers; 24: below;
    28: below; 10 between nodes: test_peers."""
    numbers = {fault[0] for fault in FAULTS}
    assert {str(n) for n in range(1, 28)} - numbers == {"24"}
    assert {fault[1] for fault in FAULTS} == set(checks.CHECKS) - HERE - {"packages"}


def test_packages(stack):
    stack["torch-npu"] = "2.14.0"
    result = next(r for r in examine(healthy(), launched()) if r.check == "packages")
    assert result.status is Status.WARN
    assert "torch-npu 2.14.0" in result.found
    del stack["vllm-ascend"]
    stack["torch-npu"] = STACK["torch-npu"]
    result = next(r for r in examine(healthy(), launched()) if r.check == "packages")
    assert result.status is Status.FAIL
    assert "image" in result.remedy


def test_no_driver_at_all():
    """A machine without NPUs: what is missing is said, and nothing raises."""
    bare = Recorded(rooms={"/dev/shm": (GIB, GIB)})
    found = {r.check: r for r in examine(bare, launched())}
    assert found["npu-health"].status is Status.FAIL
    assert "npu-smi is not there" in found["npu-health"].found
    assert found["devices"].status is Status.FAIL
    assert found["npu-link"].status is Status.SKIP


def test_npu_smi_that_answers_with_an_error():
    node = healthy()
    node.tools["npu-smi"] = lambda *words: Output(
        "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\ndcmi model initialized failed, because the device is used. ret is -8020\n",
        1,
    )
    found = {r.check: r for r in examine(node, launched())}
    assert "device is used" in found["npu-health"].found
    node.tools["hccn_tool"] = lambda *words: Output("", None)  # it did not end in time
    found = {r.check: r for r in examine(node, launched())}
    assert "no answer" in found["npu-link"].found


def test_a_card_that_has_dropped_off():
    node = healthy()
    lines = npu_smi(True).splitlines()
    kept = [line for line in lines if not line.startswith("| 3 ") and ":8" not in line[:40]]
    node.tools["npu-smi"] = lambda *words: Output(
        "\tSuper Pod ID : 3\n" if "spod-info" in words else "\n".join(kept), 0
    )
    found = {r.check: r for r in examine(node, launched())}
    assert found["npu-health"].status is Status.FAIL
    assert "dropped off" in found["npu-health"].remedy


def test_the_page_cache_of_a_container_can_be_given_back():
    node = healthy("a3x1-offload")
    folder = "/sys/fs/cgroup/docker/1234"
    node.files[f"{folder}/memory.max"] = f"{400 * GIB}\n"
    node.files[f"{folder}/memory.current"] = f"{390 * GIB}\n"
    found = {r.check: r for r in examine(node, launched("a3x1-offload"))}
    assert found["host-memory"].status is Status.FAIL
    node.files[f"{folder}/memory.stat"] = f"active_file {100 * GIB}\ninactive_file {280 * GIB}\n"
    found = {r.check: r for r in examine(node, launched("a3x1-offload"))}
    assert found["host-memory"].status is Status.PASS


def test_a_server_without_iproute2():
    node = healthy(rank=1)
    del node.tools["ip"]
    found = {r.check: r for r in examine(node, launched(rank=1))}
    assert found["interface"].status is found["route"].status is Status.SKIP


def test_devices_are_called_by_their_numbers():
    node = healthy("a2x4")
    node.tools["hccn_tool"] = hccn(False, 1, {(6, "link"): "link status: DOWN\n"})
    target = launched("a2x4", ASCEND_RT_VISIBLE_DEVICES="4,5,6,7")
    found = {r.check: r for r in examine(node, target)}
    assert found["npu-link"].found.startswith("device 6 not UP")


def test_secrets_are_not_told():
    words = [
        *command(launched().recipe, launched().node, "/m").arguments,
        "--api-key",
        "sk-secret",
        "--hf-token",
        "hf_secret",
    ]
    target = launched(
        given=["dsv41", "serve", *words], VLLM_API_KEY="secret<x>", HCCL_PASSWD="secret", VLLM_PROXY="http://u:secret@h"
    )
    told = json.dumps([r.as_json() for r in examine(healthy(), target)]) + json.dumps(facts(healthy(), target))
    assert "secret" not in told
    assert "--api-key ***" in told


def test_an_answer_that_no_check_expects():
    node = healthy("a3x1-offload")
    node.files["/proc/self/status"] = "CapEff:\tzz\n"
    found = {r.check: r for r in examine(node, launched("a3x1-offload"))}
    assert found["host-registration"].status is Status.FAIL
    assert "this check failed itself: ValueError" in found["host-registration"].found
    assert found["shm"].status is Status.PASS


def test_npu_smi_26():
    """Wider columns, and one more for processes."""
    wide = (
        "| 0     Ascend910           | OK            | 162.6                34                      0    / 0                |\n"
        "| 0     0                   | 0000:9D:00.0  | 0                    0    / 0                3419 / 65536            |\n"
        "| 7     Ascend910           | Warning       | -                    35                      0    / 0                |\n"
        "| 1     15                  | 0000:83:00.0  | 0                    0    / 0                31877/ 65536            |\n"
    )
    assert [(d.card, d.chip, d.health, d.used_mb) for d in dies(wide)] == [(0, 0, "OK", 3419), (7, 1, "Warning", 31877)]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda root: next(root.glob("quant_model_weights-00001*")).unlink(), "files that the index names are missing"),
        (lambda root: (root / "quant_model_description.json").unlink(), "quant_model_description.json is missing"),
        (lambda root: (root / "config.json").unlink(), "config.json"),
    ],
)
def test_checkpoint(converted, tmp_path, damage, said):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(converted("a", "w8a8"), copy)
    target = dataclasses.replace(launched("cpu-demo"), model=str(copy))
    assert checks.CHECKS["checkpoint"](healthy(), target).status is Status.PASS
    damage(copy)
    result = checks.CHECKS["checkpoint"](healthy(), target)
    assert result.status is Status.FAIL
    assert said in result.found
    assert "dsv41" in result.remedy


def test_the_official_checkpoint_is_not_for_npus(official):
    target = dataclasses.replace(launched("cpu-demo"), model=str(official("a")))
    result = checks.CHECKS["checkpoint"](healthy(), target)
    assert result.status is Status.FAIL
    assert "dsv41 quantize" in result.remedy


def test_image():
    node = Recorded(tools={"docker": lambda *words: Output("no such manifest: quay.io/ascend/vllm-ascend:gone\n", 1)})
    assert software.image_there(node, "quay.io/ascend/vllm-ascend:gone").status is Status.FAIL
    node.tools["docker"] = lambda *words: Output("{}", 0)
    assert software.image_there(node, "x").status is Status.PASS
    assert software.image_there(Recorded(), "x").status is Status.SKIP


def test_options_that_cannot_be_read():
    target = dataclasses.replace(launched(), options={**launched().options, "engram-config": "{cpu_offload:true}"})
    found = {r.check: r for r in examine(healthy(), target)}
    assert found["engram"].status is Status.FAIL
    assert "no JSON" in found["engram"].found


def test_compare_names_what_differs():
    """Options, environment, driver, checkpoint, interface and TLS switch of two nodes."""
    node, other = healthy(rank=0), healthy(rank=1)
    other.tools["hccn_tool"] = hccn(True, 2, {(n, "tls"): f"dev_id:{n}, tls switch[1](0:disable)\n" for n in range(16)})
    other.files["/usr/local/Ascend/driver/version.info"] = "Version=25.5.1\n"
    one = launched(rank=0)
    two = dataclasses.replace(
        launched(rank=1, OMP_NUM_THREADS="8", VLLM_API_KEY="secret"),
        options={**launched(rank=1).options, "max-num-seqs": "16"},
    )
    assert {r.status for r in compare({"0": facts(node, one), "1": facts(healthy(rank=1), launched(rank=1))})} == {
        Status.PASS
    }
    mine, theirs = facts(node, one), facts(other, two)
    theirs["network"]["NIC_NAME"] = "eth1"
    theirs["checkpoint"] = {"weights": "other"}
    found = {r.check: r for r in compare({"0": mine, "1": theirs})}
    assert "max-num-seqs: 32 / 16" in found["same-options"].found
    assert "TLS switch: ['0'] / ['1']" in found["same-ascend"].found
    assert "driver: 26.0.rc1 / 25.5.1" in found["same-ascend"].found
    assert found["same-checkpoint"].status is Status.FAIL
    assert found["same-environment"].status is Status.WARN
    assert "OMP_NUM_THREADS" in found["same-environment"].found
    assert found["same-network"].status is Status.WARN
    assert "secret" not in json.dumps(theirs)


def test_the_command(converted, tmp_path, capsys, monkeypatch):
    """On this machine, with the real stack: seconds, JSON, comparison of two reports, secrets left out."""
    monkeypatch.undo()  # the real packages
    monkeypatch.setenv("VLLM_API_KEY", "very-secret")
    checkpoint = str(converted("a", "w8a8"))
    assert main(["doctor", "cpu-demo", "--model", checkpoint]) == 0
    out = capsys.readouterr().out
    assert "PASS  checkpoint" in out
    assert "0 FAIL" in out
    reports = []
    for number in range(2):
        assert main(["doctor", "cpu-demo", "--model", checkpoint, "--json"]) == 0
        report = capsys.readouterr().out
        assert "very-secret" not in report
        reports.append(str(tmp_path / f"{number}.json"))
        Path(reports[-1]).write_text(report)
    assert main(["doctor", "compare", *reports]) == 0
    assert "7 PASS, 0 WARN, 0 FAIL" in capsys.readouterr().out
    broken = json.loads(Path(reports[1]).read_text())
    for changed in ({"fingerprint": {}}, {"fingerprint": {**broken["fingerprint"], "options": None}}):
        (tmp_path / "broken.json").write_text(json.dumps({**broken, **changed}))
        assert main(["doctor", "compare", reports[0], str(tmp_path / "broken.json")]) == 1
        assert "no report of" in capsys.readouterr().err
    damaged = json.loads(Path(reports[1]).read_text())
    damaged["fingerprint"]["options"]["max-num-seqs"] = "5"
    Path(reports[1]).write_text(json.dumps(damaged))
    assert main(["doctor", "compare", *reports]) == 1
    assert "max-num-seqs: 4 / 5" in capsys.readouterr().out
    assert main(["doctor"]) in (0, 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "one.json"], "two nodes or more"),
        (["compare", "README.md", "README.md"], "no report of"),
        (["a3"], "did you mean a3x2?"),
        (["a3x2", "a2x4"], "one recipe"),
        (["a3x2"], "fill in this server's values"),
        (["a3x2", "--node-rank", "one"], "node rank 'one'"),
        (
            [
                "a3x2",
                "--node-rank",
                "7",
                "--node0-ip",
                "1.1.1.1",
                "--local-ip",
                "1.1.1.2",
                "--nic",
                "e",
                "--model",
                "/m",
            ],
            "nodes 0 to 1",
        ),
        (["--lint-command", "nowhere.sh"], "No such file"),
        (["--", "dsv41", "serve", "m"], "need a RECIPE"),
    ],
)
def test_bad_use(words, said, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["doctor", *words]) == 1
    assert said in capsys.readouterr().err


def test_the_text_names_expected_and_remedy():
    found = examine(healthy(), launched(VLLM_USE_V2_MODEL_RUNNER="1"))
    shown = text(found, "0")
    line = shown.index("FAIL  runner")
    assert "expected: 0: drafts" in shown[line:]
    assert "remedy:   export VLLM_USE_V2_MODEL_RUNNER=0" in shown[line:]
