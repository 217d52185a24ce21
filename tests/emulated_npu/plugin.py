"""pytest: tests marked `emulated_npu` run in a fresh process that sees the device.

    @pytest.mark.emulated_npu                                  # with the other tests of the module, in one process
    @pytest.mark.emulated_npu(devices=2, device_type="A3")
    @pytest.mark.emulated_npu(fresh=True)                      # in a process of its own: engines, crashes

The process runs pytest itself on the chosen tests, so fixtures and parameters work as usual; its reports come back one
by one, so a test that kills the process fails alone and the rest go on in another. A directory's conftest.py
enables this with `from emulated_npu.plugin import *`. Where the device cannot be set up the tests are skipped with the
reason, unless EMULATED_NPU_REQUIRED is set.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from . import environment

__all__ = [
    "pytest_configure",
    "pytest_runtest_logreport",
    "pytest_runtest_logstart",
    "pytest_runtest_protocol",
    "pytest_sessionfinish",
]
_INSIDE = "EMULATED_NPU_REPORT"
_TIMEOUT = 1500
_reports: dict[str, list[dict[str, Any]]] = {}
_refused: list[str] = []
_processes: set[int] = set()
_running: dict[tuple[Any, ...], Future[None]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "emulated_npu(devices, device_type, fresh): runs in a process that sees the emulated NPU"
    )
    global _config
    _config = config


_config: pytest.Config


# ---- inside the process ----
def _write(line: dict[str, Any]) -> None:
    with open(os.environ[_INSIDE], "a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str, location: tuple[str, int | None, str]) -> None:
    if _INSIDE in os.environ:
        _write({"begins": nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _INSIDE in os.environ:
        _write(_config.hook.pytest_report_to_serializable(config=_config, report=report))


# ---- outside ----
def _group(item: pytest.Item) -> tuple[Any, ...]:
    marker = item.get_closest_marker("emulated_npu")
    assert marker is not None
    options = marker.kwargs
    return (
        item.path,
        options.get("devices", 1),
        options.get("device_type", "A2"),
        item.nodeid if options.get("fresh") else "",
    )


def _problem(item: pytest.Item) -> str:
    """What is wrong with a test's mark, or nothing."""
    marker = item.get_closest_marker("emulated_npu")
    assert marker is not None
    unknown = set(marker.kwargs) - {"devices", "device_type", "fresh"}
    if marker.args or unknown:
        return f"emulated_npu takes devices, device_type and fresh by name; found {marker.args} {sorted(unknown)}"
    device_type = marker.kwargs.get("device_type", "A2")
    return (
        ""
        if device_type in environment.SOC
        else f"device_type {device_type!r}; expected one of {sorted(environment.SOC)}"
    )


def _run(group: tuple[Any, ...], nodes: list[str], overlay: Path) -> None:
    _, devices, device_type, _ = group
    todo = list(nodes)
    while todo:
        with tempfile.TemporaryDirectory() as folder:
            reports = Path(folder) / "reports"
            reports.touch()
            variables = environment.variables(overlay, devices, device_type) | {_INSIDE: str(reports)}
            command = [
                sys.executable,
                "-X",
                "faulthandler",
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                f"--basetemp={folder}/tmp",  # sessions that begin together fight for the common place
                "-m",
                "emulated_npu",
                *todo,
            ]
            with open(Path(folder) / "output", "w+") as output:
                process = subprocess.Popen(
                    command,
                    env=variables,
                    cwd=_config.rootpath,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                _processes.add(process.pid)
                try:
                    code = process.wait(_TIMEOUT)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    code = process.wait()
                _processes.discard(process.pid)
                output.seek(0)
                text = output.read()[-6000:]
            current = ""
            for line in map(json.loads, reports.read_text().splitlines()):
                if "begins" in line:
                    current = line["begins"]
                    _reports[current] = []
                else:
                    _reports[line["nodeid"]].append(line)
        finished = {node for node in todo if any(r["when"] == "teardown" for r in _reports.get(node, []))}
        if not finished and not current:
            current = todo[0]  # the process died before any test began
        if current and current not in finished:
            _reports[current] = [_crash(current, f"the process ended with code {code} in this test\n{text}")]
            finished.add(current)
        todo = [node for node in todo if node not in finished]


def _crash(node: str, text: str) -> dict[str, Any]:
    report = pytest.TestReport(
        nodeid=node, location=("", 0, node), keywords={}, outcome="failed", longrepr=text, when="call"
    )
    data: dict[str, Any] = _config.hook.pytest_report_to_serializable(config=_config, report=report)
    return data


def _overlay() -> Path | None:
    """None: refused, the reason is in _refused."""
    if not _refused:
        try:
            return environment.prepare()
        except environment.SetupError as error:
            _refused.append(str(error))
    return None


def _start(session: pytest.Session, overlay: Path) -> None:
    """Starts all groups of the session, in order, a process or two at a time: each computes in one thread."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for item in session.items:
        if item.get_closest_marker("emulated_npu") is not None and not _problem(item):
            groups.setdefault(_group(item), []).append(item.nodeid)
    jobs = int(os.environ.get("EMULATED_NPU_JOBS") or min(2, os.cpu_count() or 1))
    pool = ThreadPoolExecutor(jobs)
    _running.update({group: pool.submit(_run, group, nodes, overlay) for group, nodes in groups.items()})


def pytest_sessionfinish() -> None:
    """After an interrupt: nothing goes on in the background."""
    for future in _running.values():
        future.cancel()
    for pid in list(_processes):
        os.killpg(pid, signal.SIGKILL)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("emulated_npu") is None or "EMULATED_NPU" in os.environ:
        return None
    overlay = _overlay()
    if overlay is None:
        if "EMULATED_NPU_REQUIRED" in os.environ:
            pytest.exit(f"the emulated NPU cannot be set up: {_refused[0]}", returncode=1)
        item.add_marker(pytest.mark.skip(reason=_refused[0]))
        return None
    problem = _problem(item)
    if problem:
        _reports[item.nodeid] = [_crash(item.nodeid, problem)]
    else:
        if not _running:
            _start(item.session, overlay)
        _running[_group(item)].result()
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for data in _reports[item.nodeid]:
        if isinstance(data["longrepr"], list):  # a skip: JSON has no tuples
            data = {**data, "longrepr": tuple(data["longrepr"])}
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # The test before may have left its module set up for this one, which did not use it.
    item.session._setupstate.teardown_exact(nextitem)
    return True
