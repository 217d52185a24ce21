"""The pytest plugin itself: reports come back whole, and only the guilty test fails."""

import json
import os
import subprocess
import sys

import pytest

from emulated_npu import environment

pytestmark = pytest.mark.long

TESTS = """
import os
import pytest

pytestmark = pytest.mark.emulated_npu


def test_passes():
    import torch

    assert torch.ones(2, device="npu").sum().item() == 2


def test_fails():
    assert 1 == 2, "on purpose"


def test_dies():
    os._exit(3)


@pytest.mark.skip(reason="not today")
def test_is_skipped():
    pass


@pytest.mark.xfail
def test_is_expected_to_fail():
    assert False


@pytest.mark.parametrize("n", [1, 2])
def test_has_parameters(n):
    assert n in (1, 2)


@pytest.mark.emulated_npu(devices=2)
def test_sees_two_devices():
    import torch

    assert torch.npu.device_count() == 2


@pytest.mark.emulated_npu(device_type="A5")
def test_names_an_unknown_device():
    pass


@pytest.mark.emulated_npu(devicess=2)
def test_is_misspelt():
    pass
"""


MIXED = """
import pytest


@pytest.fixture(scope="module")
def outside():
    yield


def test_outside(outside):
    pass


@pytest.mark.emulated_npu
def test_inside():
    pass
"""


def test_outcomes(tmp_path):
    (tmp_path / "conftest.py").write_text("from emulated_npu.plugin import *\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    # a module whose last test runs inside, between two that run outside
    (tmp_path / "test_mixed.py").write_text(MIXED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    inner = f"--basetemp={tmp_path}/inner"
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", inner, str(tmp_path)]
    path = {"PYTHONPATH": str(environment.HERE.parent)}
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True)
    text = done.stdout
    assert "4 failed, 6 passed, 1 skipped, 1 xfailed" in text, text[-3000:] + done.stderr[-2000:]
    assert "on purpose" in text
    assert "the process ended with code 3 in this test" in text
    assert "device_type 'A5'; expected one of ['A2', 'A3']" in text
    assert "found () ['devicess']" in text


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null/cache"])
def test_setup_says_what_is_wrong(place):
    command = [sys.executable, str(environment.HERE / "setup")]
    done = subprocess.run(command, env={**os.environ, "EMULATED_NPU_CACHE": place}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: setting up in {place} failed")
    assert "Traceback" not in done.stderr


def test_two_at_once_and_one_that_was_killed(tmp_path):
    """Both get the same overlay; what a killed set-up left is removed."""
    (tmp_path / "making-left").mkdir()
    command = [
        sys.executable,
        str(environment.HERE / "setup"),
        "-c",
        "import json, os; print(json.dumps(os.environ['EMULATED_NPU']))",
    ]
    variables = {**os.environ, "EMULATED_NPU_CACHE": str(tmp_path)}
    both = [subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    overlays = {json.loads(p.communicate()[0].splitlines()[-1]) for p in both}
    assert len(overlays) == 1
    assert not list(tmp_path.glob("making-*"))
