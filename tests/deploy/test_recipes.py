"""Recipes, and what is generated from them: scripts, containers, manifests, tables."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.deploy import recipe as recipes
from vllm_ascend_dsv41.deploy import render, tables
from vllm_ascend_dsv41.deploy.launch import LaunchError, Node, command, jemalloc, parse_options
from vllm_ascend_dsv41.deploy.recipe import RecipeError, load
from vllm_ascend_dsv41.deploy.serve import plugin_names

ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).parent / "expected"
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("docker/*.sh"), ROOT / ".ci/run"])
NODE = {"NODE0_IP": "10.0.0.1", "NIC_NAME": "eth0", "MODEL_PATH": "/data/weights"}


def run(script: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.environ["PATH"], "DRY_RUN": "1", **environment}
    return subprocess.run(["bash", str(script), *words], env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", recipes.names())
def test_every_value_has_its_source(name):
    recipe = load(name)
    assert recipe.written_for
    assert all(item.source in recipe.sources for _, item in recipe.items())
    assert set(recipe.title) == set(recipe.evidence) == {"en", "zh"}
    assert "trust-remote-code" not in recipe.flags


@pytest.mark.parametrize("name", recipes.names())
def test_vllm_reads_every_option(name):
    """vLLM 0.30.0's own parser, on every node; the ways with Ray, too."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_ascend_dsv41.platform.register import register_quantization

    register_quantization()
    recipe = load(name)
    for rank in range(recipe.topology.number("nodes")):
        node = Node(rank, "10.0.0.1", f"10.0.0.{rank + 1}", "eth0")
        arguments = command(recipe, node, "/data/weights").arguments
        if rank == 0 and name in render.CLUSTERS:
            arguments += ["--data-parallel-backend", "ray"]
        parsed = make_arg_parser(FlexibleArgumentParser(exit_on_error=False)).parse_args(arguments)
        assert parsed.model_tag == "/data/weights"
        assert parsed.headless == (rank > 0)
        for option, value in parse_options(arguments).items():
            if option not in ("model", "enable-prefix-caching") and not str(value).startswith("{"):
                found = getattr(parsed, option.replace("-", "_"))
                assert str(getattr(found, "value", found)) == str(value) or found == [value]


def test_plugins_are_those_that_serve_names():
    for name in ("a3x2", "a2x4", "a3x1-offload"):
        listed = str(load(name).environment["VLLM_PLUGINS"].value).split(",")
        assert set(plugin_names().split(",")) <= set(listed)  # more where vllm-ascend is installed


def test_what_is_generated_is_up_to_date():
    different = [path for path, content in render.outputs() if (ROOT / path).read_text(encoding="utf-8") != content]
    assert different == [], "run: python -m vllm_ascend_dsv41.deploy.render"


def test_a_change_of_a_recipe_is_noticed(tmp_path, monkeypatch, capsys):
    assert render.main(ROOT, check=True) == 0
    real = render.load
    monkeypatch.setattr(render, "load", lambda name: real(name, ["max-num-seqs=7"]))
    assert render.main(ROOT, check=True) == 1
    assert "scripts/serve-a3x2.sh: differs from the recipes" in capsys.readouterr().out
    assert render.main(tmp_path, check=False) == 0
    assert "--max-num-seqs 7" in (tmp_path / "scripts/serve-a3x2.sh").read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_shellcheck(script):
    checker = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([checker, "-x", str(script)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


CASES = [
    ("serve-a3x2", 0),
    ("serve-a3x2", 1),
    ("serve-a2x4", 0),
    ("serve-a2x4", 3),
    ("serve-a3x1-offload", 0),
    ("serve-cpu-demo-x2", 1),
    ("ray-a3x2", 0),
]


@pytest.mark.parametrize(("name", "rank"), CASES, ids=lambda v: str(v))
def test_dry_runs(name, rank):
    """What a script would do, beside what was committed. DSV41_WRITE_EXPECTED=1 writes it anew."""
    found = run(ROOT / f"scripts/{name}.sh", **NODE, NODE_RANK=str(rank), LOCAL_IP=f"10.0.0.{rank + 1}")
    assert found.returncode == 0, found.stderr
    lines = [line for line in found.stdout.splitlines() if not line.startswith("LD_PRELOAD=")]  # where it is installed
    text = "\n".join(lines).replace(" --", " \\\n    --") + "\n"
    path = EXPECTED / f"{name}.node{rank}.txt"
    if os.environ.get("DSV41_WRITE_EXPECTED"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "rank"), [case for case in CASES if case[0].startswith("serve-")], ids=str)
def test_serve_from_the_recipe_is_the_script(name, rank, capsys, monkeypatch):
    variables = {**NODE, "LOCAL_IP": f"10.0.0.{rank + 1}", "NODE_RANK": str(rank)}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    for key in ("VLLM_PLUGINS", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(key, raising=False)
    assert main(["serve", "--recipe", name.removeprefix("serve-"), "--dry-run", "--max-num-seqs", "3"]) == 0
    ours = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("LD_PRELOAD=")]
    script = run(ROOT / f"scripts/{name}.sh", "--max-num-seqs", "3", **variables).stdout.splitlines()
    theirs = [line for line in script if not line.startswith("LD_PRELOAD=")]
    assert shlex.split(ours[-1]) == shlex.split(theirs[-1])
    assert {tuple(shlex.split(line)) for line in ours[:-1]} == {tuple(shlex.split(line)) for line in theirs[:-1]}


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "NODE_RANK is '<NODE_RANK>': set it"),
        ({"NODE_RANK": "0", "NODE0_IP": "<NODE0_IP>"}, "NODE0_IP is '<NODE0_IP>'"),
        ({"NODE_RANK": "2", **NODE, "LOCAL_IP": "10.0.0.2"}, "NODE_RANK is '2': there are nodes 0 to 1"),
        ({"NODE_RANK": "1", **NODE, "LOCAL_IP": "10.0.0.1"}, "equal on node 0 only"),
        ({"NODE_RANK": "0", **NODE, "LOCAL_IP": "10.0.0.2"}, "equal on node 0 only"),
        ({"NODE_RANK": "01", **NODE, "LOCAL_IP": "10.0.0.2"}, "NODE_RANK is '01'"),
        ({"NODE_RANK": "one", **NODE, "LOCAL_IP": "10.0.0.2"}, "NODE_RANK is 'one'"),
        ({"NODE_RANK": "0", **NODE, "LOCAL_IP": "10.0.0.1", "MODEL_PATH": ""}, "MODEL_PATH is '<YOUR_MODEL_PATH>'"),
    ],
)
def test_placeholders_are_refused(variables, said):
    found = run(ROOT / "scripts/serve-a3x2.sh", **variables)
    assert found.returncode == 2
    assert said in found.stderr
    assert found.stdout == ""


def test_containers():
    for name, devices in (("a3", 16), ("a2", 8)):
        found = run(
            ROOT / f"docker/run-{name}.sh", "bash", "/opt/dsv41/scripts/x.sh", NODE_RANK="1", VLLM_API_KEY="secret"
        )
        words = shlex.split(found.stdout)
        assert sum(word.startswith("/dev/davinci") and word[-1].isdigit() for word in words) == devices
        assert words[-2:] == ["bash", "/opt/dsv41/scripts/x.sh"]
        assert "VLLM_API_KEY" in words
        assert "secret" not in found.stdout
    missing = subprocess.run(["bash", str(ROOT / "docker/run-a3.sh")], capture_output=True, text=True, check=False)
    assert missing.returncode == 2
    assert "is not a file on this server" in missing.stderr


@pytest.mark.parametrize("name", render.CLUSTERS)
def test_manifests(name):
    recipe = load(name)
    workers, service = yaml.safe_load_all((ROOT / f"kubernetes/lws-{name}.yaml").read_text(encoding="utf-8"))
    template = workers["spec"]["leaderWorkerTemplate"]
    assert template["size"] == recipe.topology.number("nodes")
    for role in ("leaderTemplate", "workerTemplate"):
        pod = template[role]["spec"]
        server = pod["containers"][0]
        assert server["resources"]["limits"]["huawei.com/ascend-1980"] == recipe.topology.number("devices_per_node")
        assert f"scripts/serve-{name}.sh" in server["args"][0]
        assert {m["name"] for m in server["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        assert subprocess.run(["bash", "-n", "-c", server["args"][0]], check=False).returncode == 0
    leader = template["leaderTemplate"]["spec"]["containers"][0]["env"]
    assert {"name": "DSV41_HOST", "value": "0.0.0.0"} in leader  # and with a key, therefore
    assert any(entry["name"] == "VLLM_API_KEY" and "secretKeyRef" in entry["valueFrom"] for entry in leader)
    assert service["spec"]["selector"]["role"] == "leader"


def test_secrets_are_not_printed(capsys):
    words = ["/m", "--api-key", "sk-secret", "--hf-token=hf_secret"]
    assert main(["serve", "--recipe", "cpu-demo", "--explain", *words]) == 0
    assert main(["serve", "--recipe", "cpu-demo", "--dry-run", *words]) == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    assert "--api-key ***" in out


def test_where_the_api_listens(capsys, monkeypatch):
    monkeypatch.setenv("DSV41_HOST", "10.9.9.9")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "")
    assert main(["serve", "--recipe", "cpu-demo", "--dry-run", "/m"]) == 0
    out = capsys.readouterr().out
    assert "--host 10.9.9.9" in out
    assert "VLLM_NO_USAGE_STATS=1" in out


def test_a_model_behind_options(capsys, monkeypatch, converted):
    monkeypatch.setenv("MODEL_PATH", "/elsewhere")
    checkpoint = str(converted("a", "w8a8"))
    assert main(["serve", "--recipe", "cpu-demo", "--dry-run", "--seed", "1", checkpoint]) == 0
    out = capsys.readouterr().out
    assert f"dsv41 serve {checkpoint} " in out
    assert "/elsewhere" not in out


@pytest.mark.parametrize(
    "setting", ["HCCL_BUFFSIZE=", "engram-config=", "VLLM_PLUGINS=", "enable-expert-parallel=true"]
)
def test_options_can_be_left_out(setting):
    found = load("a3x2", [setting])
    name, _, value = setting.partition("=")
    assert (name not in found.flags and name not in found.environment) or value
    assert found.topology.expert_parallel.value is True


def test_explain(capsys):
    assert main(["serve", "--recipe", "cpu-demo", "--explain", "--set", "max-num-seqs=2", "/m", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert "--max-num-seqs" in out
    assert [line.split() for line in out.splitlines() if line.startswith("--max-num-seqs")] == [
        ["--max-num-seqs", "2", "--set"]
    ]
    assert "from the command line, which wins: --seed 1" in out
    assert "guide: vllm-ascend's guide" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipe", "a3"], "did you mean a3x2?"),
        (["--recipe"], "--recipe needs a value"),
        (["--recipe", "a3x2", "/m"], "NODE0_IP is ''"),
        (["--recipe", "a3x2", "/m", "--set", "headless=true"], "headless depends on the node"),
        (["--recipe", "cpu-demo"], "model is ''"),
        (["--recipe", "cpu-demo", "/m", "--set", "nodes=2"], "2 nodes of data_parallel_size_local 1"),
        (["--recipe", "cpu-demo", "/m", "--set", "nodes"], "expected key=value"),
        (["--recipe", "cpu-demo", "/m", "--node-rank", "x"], "node rank 'x'"),
        (["--recipe", "nowhere.yaml", "/m"], "nowhere.yaml"),
        (["/m", "--dry-run"], "only with --recipe"),
        (["/m", "--node-rank", "1"], "only with --recipe"),
    ],
)
def test_serve_refuses(words, said, capsys, monkeypatch):
    for name in ("NODE_RANK", "NODE0_IP", "LOCAL_IP", "NIC_NAME", "MODEL_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert main(["serve", *words]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flags: [", "no YAML"),
        ("- a", "expected an object"),
        ("title: {en: x, zh: y}", "Field required"),
        ("flags: {}\ntopology: {}\nnonsense: 1", "nonsense: Extra inputs are not permitted"),
    ],
)
def test_a_recipe_of_ones_own(text, said, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=said):
        load(str(path))


def test_a_copy_with_a_changed_source_is_refused(tmp_path):
    text = (ROOT / "vllm_ascend_dsv41/deploy/recipes/a3x2.yaml").read_text(encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    assert load(str(path)).name == "mine"
    path.write_text(text.replace("host: {value: 127.0.0.1, source: safe}", "host: {value: 0.0.0.0, source: me}"))
    with pytest.raises(RecipeError, match="host: source 'me' is not among"):
        load(str(path))


def test_nodes_must_know_who_they_are():
    recipe = load("a3x2")
    with pytest.raises(LaunchError, match="must be different on all other nodes"):
        command(recipe, Node(1, "10.0.0.1", "10.0.0.1", "eth0"), "/m")
    with pytest.raises(LaunchError, match="must be equal on node 0"):
        command(recipe, Node(0, "10.0.0.1", "10.0.0.2", "eth0"), "/m")
    with pytest.raises(LaunchError, match="model is '<YOUR_MODEL_PATH>'"):
        command(recipe, Node(0, "10.0.0.1", "10.0.0.1", "eth0"), "<YOUR_MODEL_PATH>")


def test_jemalloc_is_found_where_it_is(tmp_path):
    assert jemalloc(tmp_path) is None
    library = tmp_path / "usr/lib64/libjemalloc.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    assert jemalloc(tmp_path) == "/usr/lib64/libjemalloc.so.2"


def test_options_are_read_as_vllm_reads_them():
    words = "serve-me -tp 8 --max_num_seqs=4 --headless --no-enable-prefix-caching --a.b.c 1 --a.d x --port 1 --port 2 -dpl=2 -q ascend --a {}"
    assert parse_options(words.split()) == {
        "model": "serve-me",
        "tensor-parallel-size": "8",
        "max-num-seqs": "4",
        "headless": True,
        "enable-prefix-caching": False,
        "a": '{"b": {"c": 1}, "d": "x"}',
        "port": "2",
        "data-parallel-size-local": "2",
        "quantization": "ascend",
    }


def test_tables_of_both_languages():
    for language in ("en", "zh"):
        assert tables.support(language).count("\n") == len(recipes.names()) + 2
        assert "`--max-model-len`" in tables.options(language, load("a3x2"))
    with pytest.raises(ValueError, match="expected support"):
        tables.filled("<!-- made: nonsense -->\n<!-- end -->", "en")
