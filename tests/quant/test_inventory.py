"""The inventory against the released checkpoints' published counts, and the tiny checkpoints."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest

from vllm_ascend_dsv41.quant import Layout, Weights, inventory, open_checkpoint
from vllm_ascend_dsv41.quant.checkpoint import description_labels
from vllm_ascend_dsv41.quant.dry_run import section

RELEASED = {
    "image_token_id": 129264,
    "text_config": {
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-20,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
        "routed_scaling_factor": 1.5,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "vocab_size": 129280,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2304,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "sliding_window": 128,
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 20,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "engram_layer_ids": [1, 14],
        "engram_num_embeddings": [384006168, 384016682],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 16000000,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "dspark_noise_token_id": 128799,
        "dspark_target_layer_ids": [37, 38, 39],
        "dspark_markov_rank": 256,
        "dspark_n_routed_experts": 128,
        "dspark_num_experts_per_tok": 3,
    },
    "vision_config": {
        "num_hidden_layers": 32,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
        "patch_size": 14,
        "rope_theta": 10000,
        "downsample_ratio": 3,
    },
}


def test_released_official_checkpoint():
    """96,085 tensors and 510,286,023,000 bytes, 266 of them the vision tower's (spec section 2)."""
    stored = [item for spec in inventory(RELEASED) for item in spec.official()]
    assert len(stored) == 96_085
    assert sum(item.bytes for item in stored) == 510_286_023_000
    vision = [item for item in stored if item.key.startswith(("vision.", "aligner.", "image_"))]
    assert len(vision) == 266
    assert sum(item.bytes for item in vision) == 970_536_960


def test_released_w8a8_checkpoint():
    """Labels by group as the W8A8 release has them (spec section 5.3)."""

    labels = description_labels(RELEASED, Weights.W8A8)
    assert Counter((section(key), label) for key, label in labels.items()) == {
        ("trunk", "W8A8_DYNAMIC"): 138_984,
        ("trunk", "FLOAT"): 670,
        ("draft", "W8A8_DYNAMIC"): 3_510,
        ("draft", "FLOAT"): 56,
        ("vision", "FLOAT"): 266,
        ("engram", "FLOAT"): 10,
    }
    tables = {item.key: item for spec in inventory(RELEASED) for item in spec.ascend(Weights.W8A8)}
    assert tables["layers.14.engram.embed.weight"].shape == (384_016_682, 256)
    assert tables["layers.14.engram.embed.scale"].shape == (384_016_682, 8)
    assert tables["layers.1.engram.wkv.weight"].dtype == "BF16"
    assert tables["layers.20.attn.compressor.wkv.weight"].dtype == "BF16"
    assert tables["layers.2.attn.compressor.wkv.weight"].dtype == "F32"


@pytest.mark.parametrize("preset", ["a", "b", "c"])
def test_tiny_checkpoints_are_complete(official, preset):
    checkpoint = open_checkpoint(official(preset))
    assert checkpoint.layout is Layout.OFFICIAL
    assert len(checkpoint.files) == sum(len(spec.official()) for spec in checkpoint.tensors)


@pytest.mark.parametrize("preset", ["a", "c"])
def test_tiny_checkpoints_are_those_of_the_golden_data(official, preset):
    lines = (Path(__file__).parents[1] / "golden" / "checkpoints.sha256").read_text().splitlines()
    digests = dict(reversed(line.split("  ")) for line in lines)
    root = official(preset)
    found = {
        f"{preset}/{path.relative_to(root)}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }
    assert found == {name: digest for name, digest in digests.items() if name.startswith(f"{preset}/")}
