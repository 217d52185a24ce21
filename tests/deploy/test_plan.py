"""The memory plan against vLLM's own planner, a real engine, and published figures."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from quant.test_inventory import RELEASED

from vllm_ascend_dsv41.cli import main
from vllm_ascend_dsv41.deploy.plan import device as devices
from vllm_ascend_dsv41.deploy.plan import plan
from vllm_ascend_dsv41.deploy.plan.cache import Caches, blocks_per_request
from vllm_ascend_dsv41.deploy.plan.device import GIB
from vllm_ascend_dsv41.deploy.plan.model import released_config
from vllm_ascend_dsv41.deploy.plan.weights import Division, by_kind, per_rank
from vllm_ascend_dsv41.deploy.recipe import load, names
from vllm_ascend_dsv41.quant import Weights
from vllm_ascend_dsv41.quant.inventory import Kind, inventory


def test_the_released_sizes_are_those_of_the_inventory():
    config = released_config()
    assert {name: config["text_config"][name] for name in RELEASED["text_config"]} == RELEASED["text_config"]
    assert {name: config["vision_config"][name] for name in RELEASED["vision_config"]} == RELEASED["vision_config"]


def test_published_figures_are_reproduced():
    found = {row["name"]: row for row in plan(load("h200-tp4")).published}
    apart = {name: row["deviation_percent"] for name, row in found.items() if abs(row["deviation_percent"]) > 1}
    assert apart == {
        "embedding, head, norms and all else": pytest.approx(-2.5, abs=0.1),
        "moved off a card by offload, H200 TP4": pytest.approx(100, abs=0.5),
    }
    assert found["global cache per token, official formats"]["computed"] == 890
    assert found["Engram per card at TP4"]["computed"] == pytest.approx(47.2, abs=0.05)
    assert found["INT8 tables with FP32 scales"]["computed"] == pytest.approx(206.0, abs=0.05)


def test_every_recipe_fits_or_says_why():
    for name in names():
        found = plan(load(name))
        assert found.fits or name.startswith("cpu"), (name, found.problems)
        assert sum(part.bytes for part in found.rank) == found.usable
        assert all(part.how in ("computed", "estimated") and part.basis for part in found.rank + found.host)


def test_the_recipes_buffer_is_what_the_exchange_asks_for():
    for name in ("a3x2", "a2x4", "a3x1-offload"):
        exchange = plan(load(name)).exchange
        assert 0 < exchange["hccl_buffsize_needed"] <= exchange["hccl_buffsize"]
    # largest tokens a rank that the default of 200 MB carries among 32 ranks: A3 less than 24, A2 52
    released = {"hidden": 5120, "experts": 384, "chosen": 6, "ranks": 32}
    assert (
        devices.mc2_buffer("Atlas 800 A3", 23, **released) <= 200 < devices.mc2_buffer("Atlas 800 A3", 24, **released)
    )
    assert (
        devices.mc2_buffer("Atlas 800 A2", 52, **released) <= 200 < devices.mc2_buffer("Atlas 800 A2", 53, **released)
    )


def test_capture_sizes():
    """vllm-ascend 0.30.0rc2's defaults for 32 sequences with five drafts: 25 sizes up to 192."""
    sizes = devices.capture_sizes(32, 5)
    assert sizes[:6] == [6, 12, 18, 24, 36, 42]
    assert (len(sizes), sizes[-1]) == (25, 192)
    assert devices.capture_sizes(4, 0) == [1, 2, 4]


def vllm_groups(config, draft_tokens, block=128):
    """Groups, bytes of a block and blocks of a request, by vLLM's planner from the specs of our cache layers."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec

    from vllm_ascend_dsv41.cache.layers import OPEN_GROUP_ROWS, OpenGroupSpec
    from vllm_ascend_dsv41.layer_plan import ModelPlan

    text, model = config["text_config"], ModelPlan.from_config(config)
    specs = {}
    mla = {"block_size": block, "num_kv_heads": 1}
    rows = -(-(1 + draft_tokens) // OPEN_GROUP_ROWS) * OPEN_GROUP_ROWS
    window = SlidingWindowSpec(
        **mla, head_size=text["head_dim"], head_size_v=0, dtype=torch.bfloat16, sliding_window=text["sliding_window"]
    )
    for layer in model.trunk:
        specs[f"{layer.index}.window"] = window
        if layer.is_kv_source:
            specs[f"{layer.index}.rows"] = MLAAttentionSpec(
                **mla, head_size=text["head_dim"], dtype=torch.bfloat16, tokens_per_state=layer.ratio
            )
            specs[f"{layer.index}.keys"] = MLAAttentionSpec(
                **mla, head_size=text["index_head_dim"] + 2, dtype=torch.int8, tokens_per_state=layer.ratio
            )
            if layer.has_open_group:
                specs[f"{layer.index}.open"] = OpenGroupSpec(
                    block_size=rows, num_kv_heads=1, head_size=2 * text["head_dim"], head_size_v=0, dtype=torch.float32
                )
    for layer in model.draft:
        specs[f"{layer.index}.window"] = window
    layout = SimpleNamespace(is_block_outermost=True)
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1
        ),
        model_config=SimpleNamespace(max_model_len=1_048_576, hf_config=SimpleNamespace(model_type="deepseek_v41")),
        max_in_flight_tokens=4096,
    )
    groups = kv_cache_utils._get_packed_kv_cache_groups(vllm_config, specs)
    needed = sum(
        -(-g.kv_cache_spec.max_memory_usage_bytes(vllm_config) // g.kv_cache_spec.page_size_bytes) for g in groups
    )
    return len(groups), kv_cache_utils._pool_bytes_per_block(groups), needed


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"kv_source_layer_ids": [2, 8, 20], "index_source_layer_ids": [2, 8, 14, 20, 24]},
        {"kv_source_layer_ids": [2, 20], "index_source_layer_ids": [2, 20]},
        {
            "kv_source_layer_ids": [2],
            "index_source_layer_ids": [2],
            "compress_ratios": [0, 0] + [1] * 38 + [0] * 3,
            "candidate_source_layer_id": -1,
        },
        {"head_dim": 256, "index_head_dim": 96},
    ],
    ids=["released", "three sources", "two sources", "one source", "other heads"],
)
@pytest.mark.parametrize("draft", [0, 5, 10])
def test_blocks_are_those_of_vllm(change, draft):
    config = json.loads(json.dumps(released_config()))
    config["text_config"].update(change)
    if not draft:
        config["text_config"]["num_nextn_predict_layers"] = 0
        config["text_config"]["compress_ratios"] = config["text_config"]["compress_ratios"][:40]
    caches = Caches.of(config, "npu", 128, draft)
    groups = caches.groups
    found = (
        groups.compressed + groups.window + groups.ring,
        groups.block_bytes,
        blocks_per_request(caches, 1_048_576, 4096),
    )
    assert found == vllm_groups(config, draft)


def held(model):
    """Bytes of parameters, and of the buffers that the plan counts among weights."""
    counted = ("bias_text", "bias_image", "qk_weight")
    buffers = sum(b.numel() * b.element_size() for name, b in model.named_buffers() if name.endswith(counted))
    return sum(p.numel() * p.element_size() for p in model.parameters()) + buffers


@pytest.mark.parametrize("weights", ["w8a8", "bf16", "w8a8-quarot"])
def test_weights_are_those_of_the_engine(converted, weights):
    """A real engine with drafts: every byte of its parameters, and the cache it plans."""
    from serving.harness import Engine

    checkpoint = converted("a", weights)
    options = {"method": "dspark", "num_speculative_tokens": 5, "enforce_eager": True}
    engine = Engine(
        str(checkpoint), dtype="bfloat16", speculative_config=options, max_num_batched_tokens=512, max_num_seqs=4
    )
    try:
        worker = engine.llm.llm_engine.model_executor.driver_worker.worker
        model, cache = worker.model_runner.get_model(), worker.model_runner.kv_cache_config
        found = plan(load("cpu-demo"), checkpoint)
        parts = [p for p in found.rank if p.basis.startswith("inventory")]
        assert sum(part.bytes for part in parts) == held(model)
        assert found.cache["blocks"] == cache.num_blocks
        assert found.cache["concurrency_at_longest"] == pytest.approx(
            worker.vllm_config.cache_config.kv_cache_max_concurrency, abs=0.01
        )
    finally:
        engine.close()


def test_every_parameter_is_on_the_ranks_once():
    """What tensor parallelism splits adds up to the whole; what it does not is on every rank."""
    config = released_config()
    tensors, text = by_kind(config), config["text_config"]
    whole, eight = (per_rank(tensors, text, Weights.BF16, Division(n, 1)) for n in (1, 8))
    assert eight["routed experts"] * 8 == whole["routed experts"]
    assert eight["shared experts"] * 8 == whole["shared experts"]
    assert eight["compressors and indexers"] == whole["compressors and indexers"]
    # with 16 heads, all but norms, patches and the biases that are added once
    towers = [per_rank(tensors, text, Weights.W8A8, Division(8, tower=n)).get("vision tower", 0) for n in (0, 1, 8)]
    assert towers[0] == 0
    assert towers[1] / 8 < towers[2] < towers[1] / 7.8
    assert whole["attention"] / 8 < eight["attention"] < whole["attention"]
    assert per_rank(tensors, text, Weights.W8A8, Division(8, 32))["routed experts"] * 32 == sum(
        spec.shape[0] * (spec.shape[1] + 4) for spec in inventory(config) if spec.kind is Kind.EXPERT
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["max-num-seqs=128"], "HCCL_BUFFSIZE 256: the exchange of 64 tokens"),
        (["tensor_parallel_size=7"], "tensor_parallel_size 7 does not divide num_attention_heads = 64"),
        (["max-model-len=2M"], "the model ends at 1048576 positions"),
        (['speculative-config={"method":"dspark","num_speculative_tokens":4}'], "drafts come in blocks of 5"),
        (['engram-config={"cpu_offload":true,"embedding_across_dp":true}'], "not there on NPUs"),
        (["gpu-memory-utilization=0.99"], "graphs and context need"),
        (["max-num-batched-tokens=65536"], "move the Engram tables to host memory"),
        (["gpu-memory-utilization=0.80"], "--max-model-len"),
        (["host_memory_gib=200", 'engram-config={"cpu_offload":true}'], "a node needs"),
    ],
)
def test_what_does_not_fit_is_said_with_a_way_out(settings, said, capsys):
    words = ["plan", "a3x2", *(word for setting in settings for word in ("--set", setting))]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert "PROBLEM" in out
    assert said in out
    assert "does not fit" in out


def test_the_proposed_length_fits_and_the_next_does_not():
    settings = ["gpu-memory-utilization=0.81"]
    problem = plan(load("a3x2", settings)).problems[0]
    length = int(problem.partition("--max-model-len ")[2].split()[0])
    assert plan(load("a3x2", [*settings, f"max-model-len={length}"])).fits
    assert not plan(load("a3x2", [*settings, f"max-model-len={length + 128}"])).fits


@pytest.mark.parametrize(
    "setting",
    [
        "block-size=0",
        "block-size=3",
        "max-num-seqs=0",
        "max-model-len=none",
        "gpu-memory-utilization=2",
        "engram-config=3",
        'compilation-config={"cudagraph_capture_sizes":["a"]}',
        'speculative-config={"num_speculative_tokens":-5}',
        "speculative-config=foo",
        "data-parallel-start-rank=0",
    ],
)
def test_nonsense_is_refused(setting, capsys):
    assert main(["plan", "a3x2", "--set", setting]) == 1
    error = capsys.readouterr().err
    assert error.startswith("dsv41: error: ")
    assert setting.partition("=")[0].split("-")[0] in error


def test_larger_graphs_are_planned():
    settings = ["max-num-seqs=128", "max-cudagraph-capture-size=768", "HCCL_BUFFSIZE=832"]
    found = plan(load("a3x2", settings))
    assert found.fits
    assert found.graphs["sizes"][-1] == 768
    assert not [note for note in found.notes if "run eagerly" in note]


def test_offload_makes_room():
    there, moved = (
        plan(load("a3x2")),
        plan(load("a3x2", ['engram-config={"cpu_offload":true,"dp_shared_memory":true}'])),
    )
    assert sum(p.bytes for p in moved.host) - sum(p.bytes for p in there.host) == pytest.approx(206 * GIB, rel=0.001)
    assert moved.cache["blocks"] > 4 * there.cache["blocks"]


def test_chart_and_json(tmp_path, capsys):
    picture = tmp_path / "plan.png"
    assert main(["plan", "a3x1-offload", "--plot", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert {part["name"] for part in found["rank"]} >= {"routed experts", "key-value cache", "headroom", "activations"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]


def test_bad_use(capsys, tmp_path):
    for picture in (tmp_path / "no" / "plan.png", tmp_path / "plan.xyz"):
        assert main(["plan", "cpu-demo", "--plot", str(picture)]) == 1
        assert f"--plot {picture}: expected NAME.png" in capsys.readouterr().err
    assert main(["plan", "a3"]) == 1
    assert "did you mean a3x2?" in capsys.readouterr().err
    assert main(["plan", "a3x2", "--model", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "a3x1-offload  DP2/TP8/EP16" in capsys.readouterr().out
