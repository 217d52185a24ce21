"""AISBench in an environment of its own: it pins numpy 1 and much else that vLLM has in other versions."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from importlib.resources import files
from pathlib import Path

from .errors import EvalError

VARIABLE = "DSV41_AISBENCH"  # where the environment lies, or is to lie
LOCK = "aisbench.lock"
OURS, COMPLETE = ".dsv41-aisbench", ".dsv41-complete"
TORCH = ("torch", "torchgen", "functorch")


@dataclass(frozen=True)
class AISBench:
    """An environment that is complete."""

    root: Path
    version: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.root / "bin" / "python"


def pins() -> dict[str, str]:
    """Versions by name, as the lock file has them."""
    lines = files(__package__).joinpath(LOCK).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def version() -> str:
    """Of AISBench."""
    return pins()["ais-bench-benchmark"]


def place() -> Path:
    """Where the environment lies: by ``DSV41_AISBENCH``, or in the user's cache under what it is made of."""
    if os.environ.get(VARIABLE):
        return Path(os.environ[VARIABLE]).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "vllm-ascend-dsv41" / f"aisbench-{version()}-{_mark()[:12]}"


def _mark() -> str:
    """Changes with whatever the environment is made of."""
    parts = (files(__package__).joinpath(LOCK).read_text(), platform.python_version(), sys.prefix, str(_torch()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _torch() -> Path:
    """The folder that holds this environment's torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise EvalError("torch is missing in this environment; AISBench needs it, too")
    return Path(found.origin).parent.parent


def installed() -> AISBench | None:
    """The environment, if it is complete and made of what it should be."""
    root = place()
    try:
        complete = (root / COMPLETE).read_text() == _mark()
    except OSError:
        return None
    return AISBench(root, version()) if complete else None


def setup(say: bool = True) -> AISBench:
    """Make the environment, unless it is there: 1.4 GB, some two minutes. Raises EvalError."""
    if (found := installed()) is not None:
        return found
    root = place()
    try:
        return _make(root, say)
    except OSError as error:
        raise EvalError(f"{root}: {error.strerror}; name a folder that can be written in {VARIABLE}") from error


def _make(root: Path, say: bool) -> AISBench:
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / f".{root.name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)  # another start may be making it
        if (found := installed()) is not None:
            return found
        if say:
            print(f"AISBench {version()} goes to {root}: 1.4 GB, some minutes", file=sys.stderr)
        _clear(root)
        _run([sys.executable, "-m", "venv", str(root)], "on Debian install python3-venv")
        remedy = (
            "pip must reach a package index (PIP_INDEX_URL) or a folder with these wheels (PIP_FIND_LINKS, "
            f"PIP_NO_INDEX=1); the list is {files(__package__).joinpath(LOCK)}, made for Python 3.11"
        )
        pip = [str(root / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "-r", str(files(__package__).joinpath(LOCK))], remedy)
        _link_torch(root)
        made = AISBench(root, version())
        _run([str(made.python), "-c", "import ais_bench.benchmark.cli.main, torch, pyarrow, datasets"], "see above")
        (root / COMPLETE).write_text(_mark())
    return made


def _clear(root: Path) -> None:
    """An empty folder that is ours. Raises EvalError where it holds anything else."""
    if root.exists() and not (root / OURS).is_file() and any(root.iterdir()):
        raise EvalError(f"{root}: holds something else; name an empty folder in {VARIABLE}")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    (root / OURS).touch()


def _link_torch(root: Path) -> None:
    """AISBench imports torch and computes nothing with it: this environment's serves, whatever device it is built for,
    and alone: other packages of this environment must not be seen."""
    source, links = _torch(), root / "torch-of-dsv41"
    links.mkdir()
    for entry in source.iterdir():
        if entry.name in TORCH or (entry.name.startswith("torch-") and entry.suffix == ".dist-info"):
            (links / entry.name).symlink_to(entry)
    packages = next((root / "lib").glob("python3.*")) / "site-packages"
    (packages / "torch_of_dsv41.pth").write_text(f"{links}\n")


def _run(command: Sequence[str], remedy: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    kept["PYTHONNOUSERSITE"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, env=kept)
    if done.returncode != 0:
        said = "\n".join((done.stderr or done.stdout).splitlines()[-8:])
        raise EvalError(f"{' '.join(command[:4])} ... ended with status {done.returncode}:\n{said}\n{remedy}")


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """For a benchmark that asks the relay: without proxies, which are not for this machine, and without the key."""
    proxies = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    kept = {name: value for name, value in os.environ.items() if name not in (*proxies, "DSV41_API_KEY")}
    return {**kept, "NO_PROXY": "127.0.0.1", **more}


def run(aisbench: AISBench, arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> int:
    """``ais_bench ARGUMENTS``, its output in ``log``. Returns its exit status, which says nothing: it is 0 when the
    server is down. Ends it and its children when this process is interrupted."""
    command = [str(aisbench.python), str(aisbench.root / "bin" / "ais_bench"), *arguments]
    # dumb, and no input: it draws with curses where it can
    # neither another Python's packages: Ascend's set_env.sh sets PYTHONPATH
    kept = environment({"TERM": "dumb", "NO_COLOR": "1", "PYTHONNOUSERSITE": "1", "HF_HUB_OFFLINE": "1", **variables})
    kept = {name: value for name, value in kept.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    # a folder of its own: it reads ./configs and writes ./tmp
    with log.open("wb") as output, tempfile.TemporaryDirectory(prefix="dsv41-aisbench-") as place:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=kept,
            cwd=place,
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers outlive a parent that was killed
            process.wait()
