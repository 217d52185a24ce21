"""Topology from the config, and the refusal of illegal ones."""

from __future__ import annotations

import copy
import json

import pytest

from vllm_ascend_dsv41.layer_plan import CandidateRole, ConfigError, ModelPlan


@pytest.fixture(scope="module")
def text(official):
    return json.loads((official("a") / "config.json").read_text())["text_config"]


def test_tiny_model(text):
    plan = ModelPlan.from_config(text)
    assert [layer.kv_source for layer in plan.trunk] == [None, None, 2, 2, 2, 5, 5, 5]
    assert [layer.index_source for layer in plan.trunk] == [None, None, 2, 2, 2, 5, 5, 7]
    assert [layer.index for layer in plan.trunk if layer.has_open_group] == [2]
    assert [layer.index for layer in plan.trunk if layer.is_index_source] == [2, 5, 7]
    assert [layer.candidate_role for layer in plan.trunk if layer.is_index_source] == [
        CandidateRole.NONE,
        CandidateRole.SOURCE,
        CandidateRole.CONSUMER,
    ]
    assert [layer.engram for layer in plan.trunk] == [None, 0, None, None, 1, None, None, None]
    assert [layer.index for layer in plan.trunk if layer.draft_target] == [5, 6, 7]
    assert [(layer.index, layer.ratio, layer.experts) for layer in plan.draft] == [(8, 0, 8), (9, 0, 8), (10, 0, 8)]


def test_released_model(text):
    released = dict(text) | {
        "num_hidden_layers": 40,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0, 0, 0],
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source_layer_id": 20,
        "engram_layer_ids": [1, 14],
        "dspark_target_layer_ids": [37, 38, 39],
    }
    plan = ModelPlan.from_config(released)
    assert [layer.kv_source for layer in plan.trunk] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    assert sum(layer.is_kv_source for layer in plan.trunk) == 4
    assert sum(layer.is_index_source and not layer.is_kv_source for layer in plan.trunk) == 4
    assert [layer.index for layer in plan.trunk if layer.candidate_role is CandidateRole.CONSUMER] == [24, 28, 32, 36]
    assert [layer.index for layer in plan.trunk if layer.has_open_group] == [2, 8, 14]


ILLEGAL = [
    ({"kv_source_layer_ids": [5, 2]}, "kv_source_layer_ids = \\[5, 2\\], expected ascending"),
    ({"kv_source_layer_ids": [2, 2]}, "kv_source_layer_ids = \\[2, 2\\], expected ascending"),
    ({"kv_source_layer_ids": [2, 8]}, "kv_source_layer_ids = \\[2, 8\\], expected layers between 0 and 7"),
    ({"kv_source_layer_ids": [-1, 5]}, "kv_source_layer_ids = \\[-1, 5\\], expected layers between"),
    ({"kv_source_layer_ids": [3, 5], "index_source_layer_ids": [3, 5, 7]}, "a source at or before layer 2"),
    ({"kv_source_layer_ids": [2]}, "compress_ratios = .*, expected ratio 2 at layer 5, as its KV source 2 has"),
    ({"kv_source_layer_ids": [1, 2, 5]}, "layers with a compress_ratio; layer 1 has 0|every KV source"),
    ({"kv_source_layer_ids": "2,5"}, "expected a list of integers"),
    ({"kv_source_layer_ids": [2.0, 5]}, "expected a list of integers"),
    ({"index_source_layer_ids": [2, 7]}, "index_source_layer_ids = \\[2, 7\\], expected every KV source"),
    ({"index_source_layer_ids": [2, 7, 5]}, "index_source_layer_ids = .*, expected ascending"),
    ({"index_source_layer_ids": [1, 2, 5]}, "index_source_layer_ids = .*; layer 1 has 0"),
    ({"compress_ratios": [0, 0, 3, 2, 2, 1, 1, 1, 0, 0, 0]}, "compress_ratios = .*, expected 0, 1 or 2"),
    ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1]}, "compress_ratios = .*, expected 8 entries, or 11"),
    ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 0, 0, 1]}, "0 for the draft stages"),
    ({"candidate_source_layer_id": 6}, "candidate_source_layer_id = 6, expected -1 or one of index_source_layer_ids"),
    ({"candidate_source_layer_id": 2}, "candidate_source_layer_id = 2, expected a source whose rows"),
    ({"candidate_topk_blocks": 0}, "candidate_topk_blocks = 0"),
    ({"candidate_block_size": 0}, "candidate_block_size = 0"),
    ({"index_topk": 0}, "index_topk = 0, expected an integer >= 1"),
    ({"index_n_heads": 0}, "index_n_heads = 0"),
    ({"index_n_heads": "8"}, "index_n_heads = '8'"),
    ({"index_head_dim": 8}, "index_head_dim = 8, expected an integer >= 16"),
    ({"o_groups": 3}, "o_groups = 3, expected a divisor of num_attention_heads = 8"),
    ({"qk_rope_head_dim": 15}, "qk_rope_head_dim = 15, expected an even number"),
    ({"qk_rope_head_dim": 128}, "qk_rope_head_dim = 128, expected an integer from 2 to 64"),
    ({"num_experts_per_tok": 17}, "num_experts_per_tok = 17, expected an integer from 1 to 16"),
    ({"n_shared_experts": 2}, "n_shared_experts = 2"),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ({"engram_layer_ids": [4, 1]}, "engram_layer_ids = \\[4, 1\\], expected ascending"),
    ({"engram_num_embeddings": [4364]}, "engram_num_embeddings = \\[4364\\], expected 2 positive numbers"),
    ({"engram_pad_token_id": 384}, "engram_pad_token_id = 384, expected an integer from 0 to 383"),
    ({"dspark_target_layer_ids": [5, 6, 8]}, "dspark_target_layer_ids = .*, expected layers between 0 and 7"),
    ({"dspark_target_layer_ids": []}, "at least one layer"),
    ({"dspark_noise_token_id": -1}, "dspark_noise_token_id = -1"),
    ({"num_hidden_layers": None}, "num_hidden_layers = None"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, expected an integer from 1 to"),
    ({"n_routed_experts": 10**9}, "n_routed_experts = 1000000000"),
    ({"hc_eps": None}, "hc_eps = None, expected a number >= 0"),
    ({"hc_eps": float("nan")}, "hc_eps = nan"),
    ({"rms_norm_eps": "1e-20"}, "rms_norm_eps = '1e-20'"),
    ({"swiglu_limit": float("inf")}, "swiglu_limit = inf, expected a finite number"),
    ({"routed_scaling_factor": -1.5}, "routed_scaling_factor = -1.5"),
    ({"rope_theta": 0}, "rope_theta = 0"),
    ({"rope_scaling": None}, "rope_scaling = None, expected an object"),
    ({"rope_scaling": {"factor": 16}}, "rope_scaling.beta_fast is missing"),
    ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu', expected 'silu'"),
    ({"norm_topk_prob": False}, "norm_topk_prob = False, expected True"),
    ({"num_key_value_heads": 2}, "num_key_value_heads = 2, expected 1"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    ({"dspark_markov_rank": None}, "dspark_markov_rank = None"),
    ({"num_hidden_layers": True}, "num_hidden_layers = True"),
    ({"hidden_size": 0}, "hidden_size = 0"),
]


@pytest.mark.parametrize(
    ("change", "message"), ILLEGAL, ids=[f"{i}-{next(iter(c))}" for i, (c, _) in enumerate(ILLEGAL)]
)
def test_illegal_configs_are_refused(text, change, message):
    config = copy.deepcopy(text) | change
    with pytest.raises(ConfigError, match=message):
        ModelPlan.from_config(config)


def without(config: dict, *path: str) -> dict:
    """A copy that lacks one field."""
    config = copy.deepcopy(config)
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    del inner[path[-1]]
    return config


@pytest.mark.parametrize(
    "name", ["hidden_size", "hc_eps", "rope_scaling", "swiglu_limit", "rms_norm_eps", "compress_ratios", "vocab_size"]
)
def test_missing_fields_are_named(text, name):
    with pytest.raises(ConfigError, match=f"config.json: {name} is missing, expected"):
        ModelPlan.from_config(without(text, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "text_config = None, expected an object"),
        ({"image_token_id": None}, "image_token_id = None"),
        ({"vision_config": "x"}, "vision_config = 'x', expected an object"),
        ({"vision_config": {"num_hidden_layers": 1.5}}, r"vision_config\.num_hidden_layers = 1\.5"),
        ({"vision_config": {"num_hidden_layers": 2}}, r"vision_config\.hidden_size is missing"),
    ],
)
def test_the_rest_of_the_config(official, change, message):
    whole = json.loads((official("a") / "config.json").read_text()) | change
    with pytest.raises(ConfigError, match=message):
        ModelPlan.from_config(whole)


def test_no_candidate_stage_and_no_draft(text):
    config = dict(text) | {"candidate_source_layer_id": -1, "num_nextn_predict_layers": 0}
    config["compress_ratios"] = config["compress_ratios"][:8]
    plan = ModelPlan.from_config(config)
    assert not plan.draft
    assert {layer.candidate_role for layer in plan.trunk} == {CandidateRole.NONE}
