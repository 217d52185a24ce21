#!/usr/bin/env python3
"""vllm-ascend's own V4.1 on the emulated NPU: runs the scenarios, each in its process, and writes their figures.

.venv/bin/python tests/emulated_npu/yardstick.py                    # all, into docs/peer-on-emulated-npu.{json,md}
.venv/bin/python tests/emulated_npu/yardstick.py c-bf16-v1 dspark-v1  # some; the others keep their figures
.venv/bin/python tests/emulated_npu/yardstick.py --list
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulated_npu import environment

RESULTS = environment.REPOSITORY / "docs" / "peer-on-emulated-npu.json"


def run(name: str, devices: int, device_type: str) -> dict[str, Any]:
    variables = environment.variables(environment.prepare(), devices, device_type)
    command = [sys.executable, "-m", "emulated_npu.peer", name]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=3000)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"failed": (done.stdout + done.stderr)[-3000:]}
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="scenarios; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (each is single-threaded)")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    from emulated_npu.peer.scenarios import SCENARIOS
    from emulated_npu.peer.table import render

    unknown = set(arguments.names) - set(SCENARIOS)
    if unknown:
        parser.error(f"unknown scenarios {', '.join(sorted(unknown))}; --list names them")
    if arguments.list:
        print("\n".join(SCENARIOS))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    failed = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        names = arguments.names or list(SCENARIOS)
        futures = {name: pool.submit(run, name, SCENARIOS[name].devices, SCENARIOS[name].device_type) for name in names}
        for name, future in futures.items():
            results[name] = future.result()
            print(name, "FAILED" if "failed" in results[name] else f"{results[name]['seconds']} s", flush=True)
            if "failed" in results[name]:
                failed.append(name)
                print(results.pop(name)["failed"])
            RESULTS.parent.mkdir(exist_ok=True)
            partial = RESULTS.with_suffix(".partial")
            partial.write_text(json.dumps({k: results[k] for k in SCENARIOS if k in results}, indent=1) + "\n")
            partial.rename(RESULTS)
            RESULTS.with_suffix(".md").write_text(render(json.loads(RESULTS.read_text())))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
