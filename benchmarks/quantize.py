"""Speed and memory of ``dsv41 quantize``: against copying, by size, by kernel; and an estimate for the real checkpoint.

    python benchmarks/quantize.py --work DIR

Makes the ``bench`` checkpoint (1.8 GB) and one of half as many layers in DIR, which should lie on the storage that
is of interest. The yardstick of a conversion is ``cp`` of the source plus writing as many bytes as the conversion
writes; each figure is the best of ``--repeat`` runs, in turn. ``durable``: everything is on the disk at the end, as a
conversion leaves it (the yardstick is followed by fsync); ``not forced``: the yardstick ends in the page cache, and
the conversion's own fsync is left out. The source is in the page cache (``warm``) or not (``cold``).
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from vllm_ascend_dsv41 import native
from vllm_ascend_dsv41.quant import Weights, dry_run, reference
from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes, write_checkpoint

MIB, GB = 1 << 20, 1e9
OFFICIAL_BYTES, OUTPUT_BYTES = 510_286_023_000, 800_093_612_936


class PeakMemory:
    """Largest resident size of a process and all below it together."""

    def __init__(self, pid: int) -> None:
        self._own = psutil.Process(pid)

    def __enter__(self) -> PeakMemory:
        self.peak, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            try:
                processes = (self._own, *self._own.children(recursive=True))
                self.peak = max(self.peak, sum(process.memory_info().rss for process in processes))
            except psutil.Error:  # one has just ended
                continue

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def payload(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*.safetensors"))


def evict(directory: Path) -> None:
    """Out of the page cache."""
    for path in payload(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(directory: Path) -> None:
    """Into the page cache."""
    for path in payload(directory):
        with path.open("rb", buffering=0) as file:
            while file.read(8 * MIB):
                pass


def write_zeros(path: Path, size: int) -> None:
    block = bytes(8 * MIB)
    with path.open("wb", buffering=0) as file:
        while size > 0:
            size -= file.write(block[: min(size, len(block))])


def force(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def yardstick(source: Path, work: Path, size: int, durable: bool) -> float:
    """``cp -r`` of the source, then ``size`` bytes written."""
    target = work / "copy"
    shutil.rmtree(target, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    write_zeros(target / "written", size)
    if durable:
        force(target)
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    os.sync()
    return seconds


@dataclass
class Run:
    """One conversion."""

    seconds: float
    peak: int
    cpu: float  # seconds of processor time, workers included


CHILD = """
import sys
from vllm_ascend_dsv41.quant import Weights, convert, partial
source, target, workers, durable = sys.argv[1:]
if not int(durable):
    sys.modules["vllm_ascend_dsv41.quant.convert"].sync = partial.sync = lambda path: None
if __name__ == "__main__":
    convert(source, target, Weights.W8A8, workers=int(workers) or None)
"""


def conversion(source: Path, work: Path, durable: bool, workers: int = 0) -> Run:
    """As the command line runs it: a process of its own, its start included."""
    target, script = work / "converted", work / "child.py"
    shutil.rmtree(target, ignore_errors=True)
    script.write_text(CHILD)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, script, source, target, str(workers), str(int(durable))])
    with PeakMemory(process.pid) as memory:
        status = process.wait()
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"the conversion ended with status {status}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    shutil.rmtree(target)
    os.sync()
    return Run(seconds, memory.peak, cpu)


def checkpoint(work: Path, name: str, **changes: Any) -> Path:
    """A bench checkpoint, made if it is not there."""
    target = work / name
    if not (target / "config.json").exists():
        write_checkpoint(Sizes(**{**PRESETS["bench"], **changes}), target)
    return target


def output_bytes(source: Path) -> int:
    return int(dry_run.dry_run(source, source.parent / "none", Weights.W8A8)["output"]["bytes"])


def against_copying(source: Path, work: Path, repeat: int) -> Run:
    """The table of ratios; returns the durable warm run."""
    size = output_bytes(source)
    read = sum(path.stat().st_size for path in payload(source))
    print(f"\n{source.name}: {read / GB:.2f} GB in, {size / GB:.2f} GB out, {os.cpu_count()} cores")
    print("| source | writes | cp + write, s | quantize, s | ratio | GB/s in | peak RSS, MiB |")
    print("|---|---|---|---|---|---|---|")
    result = None
    for state, prepare in (("warm", warm), ("cold", evict)):
        for durable in (True, False):
            base, own = [], []
            for _ in range(repeat):
                prepare(source)
                base.append(yardstick(source, work, size, durable))
                prepare(source)
                own.append(conversion(source, work, durable))
            best, seconds = min(own, key=lambda run: run.seconds), min(base)
            peak = max(run.peak for run in own)
            print(
                f"| {state} | {'durable' if durable else 'not forced'} | {seconds:.2f} | {best.seconds:.2f} | "
                f"{best.seconds / seconds:.2f} | {read / best.seconds / GB:.2f} | {peak / MIB:.0f} |",
                flush=True,
            )
            result = result or best
    assert result is not None
    return result


def linear(small: Path, large: Path, work: Path, repeat: int) -> None:
    """Processor seconds per GB at two sizes, one worker: what grows with the bytes, and what does not."""
    print("\n| checkpoint | GB in | s, 1 worker | processor s | processor s per GB |\n|---|---|---|---|---|")
    for source in (small, large):
        read = sum(path.stat().st_size for path in payload(source)) / GB
        runs = []
        for _ in range(repeat):
            warm(source)
            runs.append(conversion(source, work, True, workers=1))
        best = min(runs, key=lambda run: run.cpu)
        print(
            f"| {source.name} | {read:.2f} | {best.seconds:.2f} | {best.cpu:.2f} | {best.cpu / read:.2f} |", flush=True
        )


def rates(call: Callable[[], Any], size: int, seconds: float = 0.5) -> float:
    call()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        count += 1
    return count * size / (time.perf_counter() - start) / GB


def numba_mxfp4() -> Callable[..., int]:
    """The plain loop that the C kernel replaces: one table of 16 codes a group."""
    import numba

    @numba.njit(cache=False)
    def convert(packed: Any, exponents: Any, codes: Any, scales: Any) -> int:
        values = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
        for row in range(packed.shape[0]):
            absmax = 0.0
            for group in range(exponents.shape[1]):
                factor = 2.0 ** (np.float64(exponents[row, group]) - 127.0)
                for i in range(16):
                    byte = packed[row, group * 16 + i]
                    absmax = max(absmax, values[byte & 7] * factor, values[byte >> 4 & 7] * factor)
            scale = absmax / 127.0
            scales[row] = scale
            table = np.zeros(16, np.int8)
            for group in range(exponents.shape[1]):
                factor = 2.0 ** (np.float64(exponents[row, group]) - 127.0)
                for code in range(8):
                    table[code] = np.int8(np.rint(values[code] * factor / max(scale, 1e-30)))
                    table[code + 8] = -table[code]
                for i in range(16):
                    byte = packed[row, group * 16 + i]
                    codes[row, group * 32 + 2 * i] = table[byte & 15]
                    codes[row, group * 32 + 2 * i + 1] = table[byte >> 4]
        return -1

    return convert  # type: ignore[no-any-return]


def kernels() -> None:
    """GB of input per second and core, blocks that fit the cache."""
    random = np.random.default_rng(0)
    rows, columns = 512, 5120
    weight = random.integers(0, 127, (rows, columns), dtype=np.uint8)
    packed = random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scale, tiles = (random.integers(115, 125, (n, columns // 32), dtype=np.uint8) for n in (rows, rows // 32))
    codes, scales = np.empty((rows, columns), np.int8), np.empty(rows, np.float32)
    groups = np.empty((rows, columns // 32), np.float32)
    print("\n| GB/s of input, one core | MXFP4 to INT8 | FP8 tiles to INT8 | Engram rows to INT8 |\n|---|---|---|---|")
    for name, module, plain in (
        ("C, AVX2", native, False),
        ("C, any x86_64", native, True),
        ("reference (torch)", reference, False),
    ):
        native.plain_only(plain)
        cells = (
            rates(lambda m=module: m.int8_from_mxfp4(packed, scale, codes, scales), packed.nbytes),
            rates(lambda m=module: m.int8_from_fp8_tiles(weight, tiles, codes, scales), weight.nbytes),
            rates(lambda m=module: m.engram_int8_from_fp8(weight, scale, codes, groups), weight.nbytes),
        )
        print(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
        native.plain_only(False)
    loop = numba_mxfp4()
    print(f"| numba, plain loop | {rates(lambda: loop(packed, scale, codes, scales), packed.nbytes):.2f} | | |")


def writes(work: Path, size: int = 1 << 30) -> None:
    """Plain writes against O_DIRECT, on this storage."""
    print("\n| 1 GiB written, then fsync | GB/s |\n|---|---|")
    path, block = work / "written", np.zeros(8 * MIB + 4096, np.uint8)
    start = -block.ctypes.data % 4096
    data = memoryview(block)[start : start + 8 * MIB]
    for name, flags in (("plain", 0), ("O_DIRECT", os.O_DIRECT)):
        best = 0.0
        for _ in range(3):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags)
            begin = time.perf_counter()
            for _ in range(size // len(data)):
                os.write(descriptor, data)
            os.fsync(descriptor)
            best = max(best, size / (time.perf_counter() - begin) / GB)
            os.close(descriptor)
            path.unlink()
        print(f"| {name} | {best:.2f} |", flush=True)


def estimate(run: Run, source: Path) -> None:
    """For the real checkpoint: processor time of the durable run, scaled by bytes of input."""
    read = sum(path.stat().st_size for path in payload(source))
    core_seconds = run.cpu * OFFICIAL_BYTES / read
    print(f"\nreal checkpoint, 510 GB in, 800 GB out: {core_seconds / 60:.0f} core minutes as here")
    for cores in (2, 16, 64):
        seconds = core_seconds / cores
        reads, written = OFFICIAL_BYTES / seconds / GB, OUTPUT_BYTES / seconds / GB
        print(
            f"  {cores:3} cores: {seconds / 60:6.1f} min if storage reads {reads:.1f} and writes {written:.1f} GB/s "
            "at once; where it gives less, bytes / rate"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoints; about 12 GB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=["copying", "linear", "kernels", "writes"], default=None)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    only = arguments.only or ["copying", "linear", "writes", "kernels"]
    large = checkpoint(arguments.work, "bench")
    if "copying" in only:
        estimate(against_copying(large, arguments.work, arguments.repeat), large)
    if "linear" in only:
        half = {"n_routed_experts": 16, "dspark_n_routed_experts": 8, "engram_vocab_size": 21000}
        linear(checkpoint(arguments.work, "bench-half", **half), large, arguments.work, arguments.repeat)
    if "writes" in only:
        writes(arguments.work)
    if "kernels" in only:
        kernels()


if __name__ == "__main__":
    main()
