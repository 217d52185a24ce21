"""``dsv41 doctor compare``: what differs between nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import fingerprint
from ..launch import LaunchError
from .checks.devices import addresses, each, nodes_of, tls_switches
from .checks.software import cann_version, driver_version
from .host import Host
from .report import Result, bad, good, warn
from .target import Target

SCHEMA = 1
#: What must be equal, and what to do where it is not. What is not listed is only warned of.
MUST = {
    "options": "start all nodes with one script; different options let vLLM hang without a word (vllm#26187)",
    "checkpoint": "copy the checkpoint again: dsv41 verify CKPT --write-manifest F here, --check-manifest F there",
    "versions": "use one image on all nodes",
    "ascend": "one driver, firmware, CANN, TLS switch and superpod on all nodes: hccn_tool -i N -tls -s enable 0 "
    "for the switch",
}
MAY = {
    "environment": "export the same on all nodes",
    "network": "right where servers name their interfaces differently; otherwise correct NIC_NAME",
    "machine": "servers of one kind behave alike",
}


def facts(host: Host, target: Target) -> dict[str, Any]:
    """What is compared, of this node."""
    ascend: dict[str, Any] = {}
    if target.on_npu:
        answers = [answer.text if answer else "" for answer in each(host, target, "-tls").values()]
        spod = host.run("npu-smi", "info", "-t", "spod-info", "-i", "0", "-c", "0")
        pod = spod.text.partition("Super Pod ID")[2].split("\n")[0].strip(" :\t") if spod else ""
        ascend = {
            "driver": driver_version(host),
            "CANN": cann_version(host),
            "TLS switch": sorted({str(one) for one in tls_switches(answers)}),
            "devices": len(nodes_of(host)),
            "superpod": pod or None,
        }
    return {
        "options": {**fingerprint.options_of(target.options)},
        "environment": fingerprint.environment_of(target.environment),
        "versions": fingerprint.of_the_software(),
        "checkpoint": fingerprint.checkpoint(target.model) if target.model else {},
        "ascend": ascend,
        "network": {"NIC_NAME": target.node.nic, **{n: target.environment.get(n) for n in fingerprint.INTERFACES}},
        "machine": {"kernel": (host.text("/proc/sys/kernel/osrelease") or "").strip()},
    }


def device_addresses(host: Host, target: Target) -> dict[int, str]:
    """Addresses of the NPUs by device, for the others to ping."""
    if not target.on_npu:
        return {}
    a3 = target.recipe is not None and "A3" in target.recipe.hardware
    answers = each(host, target, "-vnic" if a3 else "-ip")
    found = addresses([answer.text if answer else "" for answer in answers.values()])
    return {device: one for device, one in zip(answers, found, strict=True) if one}


def compare(named: Mapping[str, Mapping[str, Any]]) -> list[Result]:
    """A line per part of the fingerprint, of two nodes or more; the first is what the others are held against."""
    (first, mine), *others = named.items()
    results = []
    for part, remedy in {**MUST, **MAY}.items():
        found = [
            f"{first} / {name}: {text}"
            for name, theirs in others
            for text in fingerprint.differences(mine.get(part, {}), theirs.get(part, {}))
        ]
        if found:
            line = bad if part in MUST else warn
            results.append(line(f"same-{part}", "; ".join(found), "the same on all nodes", remedy))
        else:
            results.append(good(f"same-{part}", f"{len(named)} nodes alike"))
    return results


def read_reports(paths: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Fingerprints of ``dsv41 doctor --json`` reports, by node. Raises LaunchError, OSError."""
    if len(paths) < 2:
        raise LaunchError(
            "doctor compare: name the reports of two nodes or more (dsv41 doctor RECIPE --json > node0.json)"
        )
    found: dict[str, Mapping[str, Any]] = {}
    for path in paths:
        try:
            report = json.loads(Path(path).read_text(encoding="utf-8"))
            if report["schema"] != SCHEMA:
                raise LaunchError(
                    f"{path}: schema {report['schema']}, expected {SCHEMA}; use one version of this package"
                )
            node, fingerprint_ = str(report["node"]), report["fingerprint"]
            for part in (*MUST, *MAY):
                if not isinstance(fingerprint_[part], dict):
                    raise TypeError(f"{part} of its fingerprint is no object")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, LaunchError):
                raise
            raise LaunchError(
                f"{path}: no report of `dsv41 doctor --json` ({type(error).__name__}: {error})"
            ) from error
        found[node if node not in found else f"{node} ({path})"] = fingerprint_
    return found
