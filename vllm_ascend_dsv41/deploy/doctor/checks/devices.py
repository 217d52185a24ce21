"""NPUs: how many, healthy, free, and connected. Formats of npu-smi 24 to 26 and of hccn_tool."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..host import Host, Output
from ..report import Result, bad, good, skip, warn
from ..target import Target

IDLE_MB = 4096  # of device memory that an idle die shows as used: 2.9 to 3.5 GB (vllm-ascend#12980)
_CARD = re.compile(r"^\|\s*(\d+)\s+(\S*[A-Za-z]\S*)\s*\|\s*([^|]*?)\s*\|")
_CHIP = re.compile(r"^\|\s*(\d+)(?:\s+(\d+))?\s*\|\s*[\dA-Fa-f]{4}:[\dA-Fa-f:.]+\s*\|.*?(\d+)\s*/\s*(\d+)\s*\|\s*$")
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(\S*)\s*\|\s*(\d+)\s*\|")


@dataclass(frozen=True)
class Die:
    """One row pair of ``npu-smi info``."""

    card: int
    chip: int
    health: str
    used_mb: int
    total_mb: int


def dies(text: str) -> list[Die]:
    """All of them, in order."""
    found, card = [], (-1, "")
    for line in text.splitlines():
        if match := _CARD.match(line):
            card = (int(match[1]), match[3])
        elif (match := _CHIP.match(line)) and card[0] >= 0:
            found.append(Die(card[0], int(match[1]), card[1], int(match[3]), int(match[4])))
    return found


def _smi(host: Host) -> tuple[str, str]:
    """Output of npu-smi info, and why there is none."""
    output = host.run("npu-smi", "info")
    if output is None:
        return "", "npu-smi is not there: mount /usr/local/bin/npu-smi and /usr/local/dcmi into the container"
    if not dies(output.text):
        return "", " ".join(output.text.split())[:200] or "npu-smi did not answer"
    return output.text, ""


def visible(host: Host, target: Target) -> list[int]:
    """Numbers of the devices that the server may use. Raises ValueError."""
    text = target.environment.get("ASCEND_RT_VISIBLE_DEVICES", "")
    if not text:
        return nodes_of(host)
    return [int(part) for part in text.split(",")]


def nodes_of(host: Host) -> list[int]:
    """Numbers of /dev/davinciN."""
    return sorted(int(entry[7:]) for entry in host.names("/dev") if re.fullmatch(r"davinci\d+", entry))


def device_files(host: Host, target: Target) -> Result:
    """/dev/davinciN in the container: enough of them, and both dies of each A3 card."""
    name = "devices"
    if not target.on_npu:
        return skip(name, "no NPU wanted")
    there = nodes_of(host)
    wanted = target.devices
    if len(there) < wanted:
        return bad(
            name,
            f"{len(there)} of /dev/davinci0 to {wanted - 1}: {there}",
            f"{wanted}: {target.local} replicas of {target.number('tensor-parallel-size', 1)}",
            f"start the container with --device /dev/davinciN for N from 0 to {wanted - 1} (docker/)",
        )
    missing = [entry for entry in ("davinci_manager", "devmm_svm", "hisi_hdc") if entry not in host.names("/dev")]
    if missing:
        return bad(
            name,
            f"/dev/{', /dev/'.join(missing)} missing",
            "davinci_manager, devmm_svm, hisi_hdc",
            "start the container with --device for each",
        )
    if _a3(target):
        halves = [n for n in there if n ^ 1 not in there]
        if halves:
            return bad(
                name,
                f"one die of a card only: {halves}",
                "both dies of each A3 card",
                "give the container both /dev/davinci(2N) and (2N+1)",
            )
    return good(name, f"{len(there)} devices")


def visible_devices(host: Host, target: Target) -> Result:
    """ASCEND_RT_VISIBLE_DEVICES: ascending numbers of devices that are there."""
    name = "visible-devices"
    text = target.environment.get("ASCEND_RT_VISIBLE_DEVICES")
    if not target.on_npu or text is None:
        return skip(name, "not set")
    numbers = [part.strip() for part in text.split(",")]
    expected = f"{target.devices} ascending numbers of /dev/davinciN"
    remedy = f"export ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, range(target.devices)))}"
    if not all(part.isdecimal() for part in numbers):
        return bad(name, text, expected, remedy)
    found = [int(part) for part in numbers]
    there = nodes_of(host)
    outside = [n for n in found if n not in there]
    if there and outside:
        return bad(name, f"{text}: no /dev/davinci{outside[0]}", expected, remedy)
    if found != sorted(set(found)):
        return bad(name, f"{text}: not ascending (EE1001)", expected, remedy)
    if len(found) < target.devices:
        return bad(name, f"{len(found)} devices for {target.devices} ranks", expected, remedy)
    return good(name, f"{len(found)} devices")


def _used(host: Host, target: Target, shown: list[Die]) -> list[Die]:
    """The dies that the server takes; all where that is not said."""
    try:
        numbers = visible(host, target)
    except ValueError:
        return shown
    return [die for number, die in enumerate(shown) if number in numbers] or shown


def health(host: Host, target: Target) -> Result:
    """Health of each die."""
    name = "npu-health"
    if not target.on_npu:
        return skip(name, "no NPU wanted")
    text, why = _smi(host)
    if not text:
        return bad(
            name,
            why,
            "npu-smi info with all dies",
            "driver and devices must be usable here: reboot or reinstall the driver; in a container mount them",
        )
    shown = dies(text)
    if len(shown) < max(target.devices, len(nodes_of(host))):
        return bad(
            name,
            f"npu-smi shows {len(shown)} dies",
            f"{max(target.devices, len(nodes_of(host)))}, as many as there are device files or ranks",
            "a card has dropped off: look at dmesg on the host, and reboot it",
        )
    ill = [f"NPU {die.card} chip {die.chip}: {die.health}" for die in _used(host, target, shown) if die.health != "OK"]
    if ill:
        return bad(
            name,
            ", ".join(ill),
            "OK",
            "npu-smi info -t health -i N says more; leave that server out until it is repaired",
        )
    return good(name, f"{len(dies(text))} dies OK")


def busy(host: Host, target: Target) -> Result:
    """Device memory that somebody else holds."""
    name = "npu-free"
    if not target.on_npu:
        return skip(name, "no NPU wanted")
    text, why = _smi(host)
    if not text:
        return skip(name, why)
    mine = _used(host, target, dies(text))
    held = [f"NPU {die.card} chip {die.chip}: {die.used_mb} MB" for die in mine if die.used_mb > IDLE_MB]
    if held:
        owners = sorted({match[3] for line in text.splitlines() if (match := _PROCESS.match(line))})
        return bad(
            name,
            f"{', '.join(held[:4])}{' ...' if len(held) > 4 else ''}; processes "
            f"{', '.join(owners) or '(none shown: another container, or killed)'}",
            f"less than {IDLE_MB} MB used on each die",
            "end the old server on the host (npu-smi info shows the processes); after kill -9 it can take a "
            "minute, or a reset of the NPU",
        )
    return good(name, f"all dies below {IDLE_MB} MB")


def asked_devices(host: Host, target: Target) -> list[int]:
    """Numbers of the devices that hccn_tool is asked about."""
    try:
        return visible(host, target)
    except ValueError:
        return nodes_of(host)


def each(host: Host, target: Target, *question: str) -> dict[int, Output | None]:
    """hccn_tool's answer for each visible device."""
    devices = asked_devices(host, target)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda n: host.run("hccn_tool", "-i", str(n), *question, "-g"), devices)
        return dict(zip(devices, answers, strict=True))


def _asked(name: str, question: str, host: Host, target: Target) -> tuple[dict[int, str], Result | None]:
    """Answers by device, or the line that says why there are none."""
    if not target.on_npu:
        return {}, skip(name, "no NPU wanted")
    if target.nodes == 1:
        return {}, skip(name, "one server: its NPUs are connected inside")
    answers = each(host, target, f"-{question}")
    if not answers or next(iter(answers.values())) is None:
        return {}, skip(name, "hccn_tool is not there: mount /usr/local/Ascend/driver/tools/hccn_tool")
    said = {n: a.text if a is not None and a.status is not None else "" for n, a in answers.items()}
    return said, None


def _fault(target: Target) -> Callable[[str, str, str, str], Result]:
    """What a NIC of the NPUs that is down means: the end on A2; A3 servers of one superpod do not need it."""
    return warn if _a3(target) else bad


def _a3(target: Target) -> bool:
    return target.recipe is not None and "A3" in target.recipe.hardware


def link(host: Host, target: Target) -> Result:
    """Network ports of the NPUs."""
    name = "npu-link"
    answers, instead = _asked(name, "link", host, target)
    if instead:
        return instead
    down = [n for n, text in answers.items() if "link status: UP" not in text]
    if down:
        return _fault(target)(
            name,
            f"device {', '.join(map(str, down))} not UP: {' '.join(answers[down[0]].split()) or 'no answer'}",
            "link status: UP",
            "check cable, optical module and switch port (hccn_tool -i N -optical -g)",
        )
    return good(name, f"{len(answers)} UP")


def net_health(host: Host, target: Target) -> Result:
    """What the NPUs' own probe says."""
    name = "npu-net-health"
    answers, instead = _asked(name, "net_health", host, target)
    if instead:
        return instead
    states = {}
    for n, text in answers.items():
        match = re.search(r"net health status:\s*([\w ]+)", text)
        states[n] = match[1].strip() if match else "no answer"
    ill = [f"device {n}: {state}" for n, state in states.items() if state not in ("Success", "Init")]
    if ill:
        return _fault(target)(
            name,
            ", ".join(ill),
            "Success",
            "check gateway and probe address: hccn_tool -i N -gateway -g, -netdetect -g",
        )
    if "Init" in states.values():
        return good(name, "Init: no probe address is set (hccn_tool -netdetect), which is no fault")
    return good(name, f"{len(answers)} Success")


def tls(host: Host, target: Target) -> Result:
    """The TLS switch must be the same everywhere: here on all devices, and by ``compare`` on all nodes."""
    name = "npu-tls"
    answers, instead = _asked(name, "tls", host, target)
    if instead:
        return instead
    switches = tls_switches(list(answers.values()))
    if None in switches:
        return skip(name, f"not told for device {switches.index(None)}")
    if len(set(switches)) > 1:
        return bad(
            name,
            f"switch per device: {switches}",
            "the same on all devices of all nodes",
            "hccn_tool -i N -tls -s enable 0 for every device",
        )
    return good(name, f"switch {switches[0]} on all devices; compare the nodes (dsv41 doctor compare)")


def tls_switches(answers: list[str]) -> list[int | None]:
    """Of each device; None where it is not told."""
    found = [re.search(r"tls switch\[(\d)\]", text) for text in answers]
    return [int(match[1]) if match else None for match in found]


def address(host: Host, target: Target) -> Result:
    """Every NPU needs an IPv4 address of its own for RoCE (A2) or the superpod's (A3)."""
    name = "npu-address"
    question = "vnic" if _a3(target) else "ip"
    answers, instead = _asked(name, question, host, target)
    if instead:
        return instead
    numbers, found = list(answers), addresses(list(answers.values()))
    without = [n for n, one in zip(numbers, found, strict=True) if one is None]
    if without:
        said = " ".join(answers[without[0]].split()) or "no answer"
        return bad(
            name,
            f"device {', '.join(map(str, without))} without IPv4: {said}",
            "an address for every device",
            "hccn_tool -i N -ip -s address A netmask M, and a gateway; HCCL uses IPv4",
        )
    return good(name, f"{len(found)} addresses, {found[0]} and so on")


def addresses(answers: list[str]) -> list[str | None]:
    """IPv4 of each device; None where there is none."""
    found = [re.search(r"ipaddr:\s*([\d.]+)", text) for text in answers]
    return [match[1] if match else None for match in found]


def superpod(host: Host, target: Target) -> Result:
    """A3 servers must be of one superpod; which one, ``compare`` compares."""
    name = "superpod"
    if not _a3(target) or target.nodes == 1 or not target.on_npu:
        return skip(name, "only between A3 servers")
    output = host.run("npu-smi", "info", "-t", "spod-info", "-i", "0", "-c", "0")
    match = re.search(r"Super Pod ID\s*:\s*(\d+)", output.text) if output else None
    if match is None:
        return warn(
            name,
            "npu-smi does not tell a superpod",
            "a Super Pod ID, the same on all servers",
            "update npu-smi; servers outside a superpod reach each other by RoCE only",
        )
    return good(name, f"super pod {match[1]}; compare the nodes (dsv41 doctor compare)")


CHECKS: dict[str, Callable[[Host, Target], Result]] = {
    "devices": device_files,
    "visible-devices": visible_devices,
    "npu-health": health,
    "npu-free": busy,
    "npu-link": link,
    "npu-net-health": net_health,
    "npu-tls": tls,
    "npu-address": address,
    "superpod": superpod,
}
