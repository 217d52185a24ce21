"""What the machine allows, asked of a /proc and control groups made for the test."""

from __future__ import annotations

import resource

import pytest

from vllm_ascend_dsv41.engram import limits, numa
from vllm_ascend_dsv41.engram.memory import EngramMemoryError


@pytest.mark.parametrize(
    ("release", "free"),
    [
        ("5.10.0-60.18.0.50.oe2203.aarch64", False),
        ("4.19.90", False),
        ("5.11.0", True),
        ("5.15.0-91-generic", True),
        ("6.1.0-18-arm64", True),
        ("10.0", True),
    ],
)
def test_kernels_that_map_memory_of_others(release, free):
    assert limits.maps_anonymous_memory(release) == free


def group(folder, limit, used, inactive, version=2):
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    key = "inactive_file" if version == 2 else "total_inactive_file"
    active = key.replace("inactive", "active")
    (folder / "memory.stat").write_text(f"anon 5\n{key} {inactive}\n{active} {7 << 20}\nslab 3\n")


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_counts(tmp_path, version):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    line = "0::/pod/box" if version == 2 else "9:cpu,memory:/pod/box"
    (proc / "self/cgroup").write_text(f"{line}\n3:pids:/x\n")
    root = cgroups if version == 2 else cgroups / "memory"
    group(root / "pod/box", "max" if version == 2 else 1 << 62, 100 << 20, 0, version)
    group(root / "pod", 512 << 20, 100 << 20, 30 << 20, version)
    found = limits.control_group(proc, cgroups)
    assert found is not None
    assert found.bytes == (512 - 100 + 30 + 7) << 20  # all of the page cache can go
    assert str(root / "pod") in found.limit


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert limits.control_group(tmp_path, tmp_path) is None
    assert limits.machine().bytes > 0


def test_memory_is_compared_with_some_to_spare():
    limits.check_memory(100 << 30, 8, limits.Available(105 << 30, "x"))
    with pytest.raises(EngramMemoryError, match=r"8 ranks .* need 102\.0 GiB .* there are 105\.0 GiB \(x\)"):
        limits.check_memory(102 << 30, 8, limits.Available(105 << 30, "x"))


def test_warnings_before_registering(tmp_path, monkeypatch):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text("Name: x\nCapEff:\t0000000000000000\n")
    (tmp_path / "svm/dev0/feature").mkdir(parents=True)
    (tmp_path / "svm/dev0/feature/host_mem_pool").write_text("0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    locked, pool = limits.registration_warnings(1 << 30, tmp_path)
    assert "65,536" in locked
    assert "ulimit -l unlimited" in locked
    assert "host_mem_pool is 0" in pool
    (tmp_path / "svm/dev0/feature/host_mem_pool").unlink()
    assert "host_mem_pool is missing" in limits.registration_warnings(1 << 30, tmp_path)[1]
    (tmp_path / "svm/dev0/feature/host_mem_pool").write_text("1\n")
    (tmp_path / "self/status").write_text("Name: x\nCapEff:\t000001ffffffffff\n")
    assert limits.registration_warnings(1 << 30, tmp_path) == []


TOPOLOGY = """\
           NPU0       NPU1       NPU2       NPU3       CPU Affinity
NPU0       X          HCCS       HCCS       HCCS       144-167
NPU1       HCCS       X          HCCS       HCCS       {cpus}
NPU2       HCCS       HCCS       X          HCCS       NA

Legend:
  X    = Self
"""


@pytest.mark.parametrize(
    ("device", "visible", "node"), [(1, "", 0), (0, "1,2", 0), (1, "1,2", None), (0, "", None), (9, "1", None)]
)
def test_the_node_of_an_npu(tmp_path, monkeypatch, device, visible, node):
    """As npu-smi prints it (the format that vllm-ascend 0.30.0rc2 reads)."""
    tool = tmp_path / "npu-smi"
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + TOPOLOGY.format(cpus="0") + "END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    assert numa.node_of_npu(device) == node


def test_without_npu_smi_the_node_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert numa.node_of_npu(0) is None


def test_lists_of_the_kernel():
    assert numa.parse_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert numa.parse_list("\n") == []
