"""The generated scripts on two hosts: DP2 and EP2 over a real network, a doctor before, a watch behind."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from deploy.hosts import NIC, two_hosts, why_not
from vllm_ascend_dsv41.deploy.demo import ENVIRONMENT

SCRIPT = Path(__file__).parents[2] / "scripts/serve-cpu-demo-x2.sh"
PROMPTS = ["hello world", "def main():", "1 2 3 4 5 6 7", "The quick brown fox jumps over the lazy dog"]
START_S, LOST_S = 240, 60
pytestmark = pytest.mark.long

ASK = """
import json, sys, urllib.request
def ask(prompt):
    body = {{"model": "deepseek-v41", "prompt": prompt, "max_tokens": 12, "temperature": 0, "return_token_ids": True}}
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {{"Content-Type": "application/json"}})
    return json.load(urllib.request.urlopen(request, timeout=120))["choices"][0]["token_ids"]
print(json.dumps([ask(prompt) for prompt in {prompts!r}]))
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    why = why_not()
    if why:
        assert not os.environ.get("TWO_HOSTS_REQUIRED"), why
        pytest.skip(why)
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def launch(host, checkpoint, *words, cores=True, **changed):
    """The script on one host, with its five variables."""
    variables = {
        **ENVIRONMENT,
        "NODE_RANK": str(host.number),
        "NODE0_IP": "10.77.0.1",
        "LOCAL_IP": host.address,
        "NIC_NAME": NIC,
        "MODEL_PATH": str(checkpoint),
        "VLLM_CPU_OMP_THREADS_BIND": str(host.number % (os.cpu_count() or 1)),
        "DOCTOR_OPTIONS": "--peers --wait 60",
        **changed,
    }
    return host.start("bash", str(SCRIPT), *words, **variables)


def ready(host, process, log):
    """Wait for node 0's API."""
    check = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5).status)"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            if host.python(check).strip() == "200":
                return
        except AssertionError:
            time.sleep(1)
    raise AssertionError(f"not ready:\n{log.read_text(errors='replace')[-3000:]}")


def test_two_hosts_serve_and_one_that_is_lost_is_named(hosts, converted, tmp_path):
    checkpoint = converted("a", "bf16")  # in float32, where answers do not depend on who computes what
    first, second = hosts
    one, log_one = launch(first, checkpoint, "--dtype", "float32", DSV41_STARTUP_REPORT=str(tmp_path / "ready.json"))
    _, log_two = launch(second, checkpoint, "--dtype", "float32", DSV41_STARTUP_REPORT=str(tmp_path / "ready.json"))
    ready(first, one, log_one)
    answers = json.loads(first.python(ASK.format(prompts=PROMPTS * 2), timeout=300))
    assert answers[: len(PROMPTS)] == answers[len(PROMPTS) :]  # whichever replica answered
    for log in (log_one, log_two):
        text = log.read_text(errors="replace")
        assert "PASS  peers              2 nodes reach each other" in text
        assert "ready to serve:" in text
    reports = [json.loads((tmp_path / name).read_text()) for name in ("ready.json", "ready.json.dp1")]
    assert [report["parallel"]["data_rank"] for report in reports] == [0, 1]
    assert all(report["parallel"]["experts_divided"] and report["draft"] == "DSpark, 5 tokens" for report in reports)
    time.sleep(5)  # idle: nothing is sent between the engines, and vLLM itself would notice nothing
    second.kill()
    assert one.wait(LOST_S) != 0
    assert "dsv41: error: the node with data-parallel ranks 1 to 1 (10.77.0.2) has gone" in log_one.read_text(
        errors="replace"
    )
    first.kill()
    # the same on one host
    words = ["dsv41", "serve", "--recipe", "cpu-demo", str(checkpoint), "--dtype", "float32"]
    alone, log = first.start(*words, **ENVIRONMENT)
    ready(first, alone, log)
    assert json.loads(first.python(ASK.format(prompts=PROMPTS), timeout=300)) == answers[: len(PROMPTS)]
    first.kill()


def both(hosts, checkpoint, *words, second=None, **changed):
    """Both scripts, the first with changes; the logs of both once the first has ended."""
    other, log_two = launch(hosts[1], second or checkpoint)
    process, log = launch(hosts[0], checkpoint, *words, **changed)
    try:
        status = process.wait(60)
    finally:
        for host in hosts:
            host.kill()
        other.wait()
    return status, log.read_text(errors="replace"), log_two.read_text(errors="replace")


@pytest.mark.parametrize(
    ("changed", "words", "said"),
    [
        ({"NIC_NAME": "eth7"}, [], "FAIL  interface          no interface eth7"),
        (
            {"LOCAL_IP": "10.77.0.9", "NODE0_IP": "10.77.0.9", "DOCTOR_OPTIONS": ""},
            [],
            "FAIL  interface          eth0 has 10.77.0.1",
        ),
        ({}, ["--max-num-seqs", "2"], "FAIL  same-options       node 0 / node 1: max-num-seqs: 2 / 4"),
        (
            {},
            ["--data-parallel-start-rank", "0"],
            "FAIL  start-rank         --data-parallel-start-rank 0 without --headless",
        ),
        (
            {"DOCTOR_OPTIONS": "--peers --wait 2", "NODE_RANK": "1", "LOCAL_IP": "10.77.0.2", "NIC_NAME": NIC},
            [],
            "FAIL",
        ),
    ],
    ids=["NIC", "IP", "flag", "start rank", "rank"],
)
def test_the_doctor_stops_a_start(hosts, converted, changed, words, said):
    status, log, _ = both(hosts, converted("a", "w8a8"), *words, **changed)
    assert status == 1
    assert said in log
    assert "not started; SKIP_DOCTOR=1 starts all the same" in log
    assert "Initializing a V1 LLM engine" not in log


def test_a_port_that_is_taken(hosts, converted):
    holder, _ = hosts[0].start(
        "python", "-c", "import socket, time; s = socket.create_server(('127.0.0.1', 8000)); time.sleep(60)"
    )
    time.sleep(1)
    status, log, _ = both(hosts, converted("a", "w8a8"))
    holder.wait()
    assert status == 1
    assert "FAIL  ports              127.0.0.1:8000 (--port): [Errno 98]" in log


def test_another_checkpoint(hosts, converted):
    status, log, other = both(hosts, converted("a", "w8a8"), second=converted("a", "w8a8-quarot"))
    assert status == 1
    for text in (log, other):
        assert "FAIL  same-checkpoint    node 0 / node 1: " in text
