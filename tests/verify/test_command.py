"""The command line, and manifests."""

from __future__ import annotations

import json
import subprocess

import pytest

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.quant import CheckpointError
from vllm_ascend_dsv41.verify import verify

from .damage import edit_json


def test_command(official, converted, capsys):
    assert main(["verify", str(converted("a", "w8a8")), "--against", str(official("a")), "--sample", "1"]) == 0
    out = capsys.readouterr().out
    assert "everything checked holds" in out
    assert "expert" in out
    other = str(official("b"))  # made here or earlier: it prints its size
    capsys.readouterr()
    assert main(["verify", str(converted("a", "w8a8")), "--against", other, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] is False
    assert main(["verify", str(converted("a", "w8a8")), "--against", str(converted("a", "bf16"))]) == 1
    assert "already in the Ascend layout; give the official checkpoint" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["verify", "x", "--sample", "0"])


def test_manifest(copy, tmp_path, capsys):
    directory, manifest = copy(), tmp_path / "SHA256SUMS"
    (directory / "a b\nc\\d").write_text("a name that sha256sum escapes")
    assert main(["verify", str(directory), "--write-manifest", str(manifest)]) == 0
    subprocess.run(["sha256sum", "--check", "--quiet", str(manifest)], cwd=directory, check=True)
    assert main(["verify", str(directory), "--check-manifest", str(manifest)]) == 0
    names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    for style in ("--text", "--binary"):
        sums = subprocess.run(
            ["sha256sum", style, *[f"./{n}" for n in names]], cwd=directory, capture_output=True, check=True
        )
        manifest.write_bytes(sums.stdout)
        assert main(["verify", str(directory), "--check-manifest", str(manifest)]) == 0
    capsys.readouterr()
    assert main(["verify", str(directory), "--write-manifest", str(manifest)]) == 1
    assert "exists already; remove it, or check against it" in capsys.readouterr().err
    assert main(["verify", str(directory), "--write-manifest", str(tmp_path / "no" / "sums")]) == 1
    assert "no such directory; create it first" in capsys.readouterr().err
    inside = directory / "SHA256SUMS"
    assert main(["verify", str(directory), "--write-manifest", str(inside)]) == 0
    assert main(["verify", str(directory), "--check-manifest", str(inside)]) == 0
    edit_json(directory / "generation_config.json", lambda c: c.update(temperature=0.5))
    (directory / "new").touch()
    (directory / "tokenizer_config.json").rename(directory / "renamed")
    capsys.readouterr()
    assert main(["verify", str(directory), "--check-manifest", str(inside)]) == 1
    out = capsys.readouterr().out
    for problem in (
        "tokenizer_config.json is missing",
        "new is not in the manifest",
        "generation_config.json has changed",
    ):
        assert problem in out
    assert main(["verify", str(directory), "--write-manifest", str(tmp_path / "late")]) == 1
    assert "SKIP  manifest     not written: the checkpoint is not as it must be" in capsys.readouterr().out
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no manifest\n", "line 1 is not of the form that sha256sum writes"),
        ("z" * 64 + "  config.json\n", "line 1 is not of the form"),
        (
            "0" * 64 + "  config.json\n\n" + "1" * 64 + "  ./config.json\n",
            "line 3 names config.json again",
        ),
        (None, r"sums: cannot be read \(No such file"),
    ],
)
def test_manifests_that_are_none(copy, tmp_path, text, message):
    if text is not None:
        (tmp_path / "sums").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        verify(copy(), check_manifest=tmp_path / "sums")
