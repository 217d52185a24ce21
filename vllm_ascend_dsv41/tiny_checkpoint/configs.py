"""The JSON files beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .sizes import BLOCK, Sizes, engram_primes
from .tokenizer import BOS, EOS, IMAGE_PLACEHOLDER, NOISE_TOKEN, PAD

def hf_config(s: Sizes, token_id: Callable[[str], int], compressed: int) -> dict[str, Any]:
    """The Hugging Face ``config.json``."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_hidden_layers,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": s.head_dim,
        "qk_rope_head_dim": s.qk_rope_head_dim,
        "q_lora_rank": s.q_lora_rank,
        "o_lora_rank": s.o_lora_rank,
        "o_groups": s.o_groups,
        "moe_intermediate_size": s.moe_intermediate_size,
        "n_routed_experts": s.n_routed_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": s.num_experts_per_tok,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": s.routed_scaling_factor,
        "hidden_act": "silu",
        "swiglu_limit": s.swiglu_limit,
        "rms_norm_eps": s.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": s.max_position_embeddings,
        "rope_theta": s.rope_theta,
        "compress_rope_theta": s.compress_rope_theta,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": s.rope_factor,
            "beta_fast": s.rope_beta_fast,
            "beta_slow": s.rope_beta_slow,
            "original_max_position_embeddings": s.original_max_position_embeddings,
        },
        "sliding_window": s.sliding_window,
        "compress_ratios": s.compress_ratios + [0] * s.num_nextn_predict_layers,
        "kv_source_layer_ids": s.kv_source_layer_ids,
        "index_source_layer_ids": s.index_source_layer_ids,
        "index_n_heads": s.index_n_heads,
        "index_head_dim": s.index_head_dim,
        "index_topk": s.index_topk,
        "candidate_source_layer_id": s.candidate_source_layer_id,
        "candidate_topk_blocks": s.candidate_topk_blocks,
        "candidate_block_size": s.candidate_block_size,
        "hc_mult": s.hc_mult,
        "hc_sinkhorn_iters": s.hc_sinkhorn_iters,
        "hc_eps": s.hc_eps,
        "engram_layer_ids": s.engram_layer_ids,
        "engram_num_embeddings": [sum(primes) for primes in engram_primes(s)],
        "engram_max_ngram_size": s.engram_max_ngram_size,
        "engram_vocab_size": s.engram_vocab_size,
        "engram_n_heads": s.engram_n_heads,
        "engram_head_dim": s.engram_head_dim,
        "engram_pad_token_id": s.engram_pad_token_id,
        "engram_compressed_vocab_size": compressed,
        "num_nextn_predict_layers": s.num_nextn_predict_layers,
        "dspark_block_size": s.dspark_block_size,
        "dspark_noise_token_id": token_id(NOISE_TOKEN),
        "dspark_target_layer_ids": s.dspark_target_layer_ids,
        "dspark_markov_rank": s.dspark_markov_rank,
        "dspark_n_routed_experts": s.dspark_n_routed_experts,
        "dspark_num_experts_per_tok": s.dspark_num_experts_per_tok,
    }
    vision = {
        "model_type": "deepseek_v41_vision",
        "num_hidden_layers": s.vision_num_hidden_layers,
        "hidden_size": s.vision_hidden_size,
        "num_attention_heads": s.vision_num_attention_heads,
        "intermediate_size": s.vision_intermediate_size,
        "patch_size": s.vision_patch_size,
        "rope_theta": s.vision_rope_theta,
        "downsample_ratio": s.vision_downsample_ratio,
        "max_image_tokens": s.vision_max_image_tokens,
        "min_pixels": s.vision_min_pixels,
        "max_wh_ratio": None,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "transformers_version": "5.6.0",
        "bos_token_id": token_id(BOS),
        "eos_token_id": token_id(EOS),
        "pad_token_id": token_id(PAD),
        "image_token_id": token_id(IMAGE_PLACEHOLDER),
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": vision,
    }


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    """The flat ``inference/config.json``: the same numbers under the names of the official code."""
    t, v = config["text_config"], config["vision_config"]
    rope = t["rope_scaling"]
    same = (
        "vocab_size n_routed_experts n_shared_experts q_lora_rank head_dim o_groups o_lora_rank swiglu_limit "
        "rope_theta compress_rope_theta compress_ratios index_n_heads index_head_dim index_topk "
        "candidate_topk_blocks candidate_block_size hc_mult hc_sinkhorn_iters hc_eps engram_layer_ids "
        "engram_num_embeddings engram_max_ngram_size engram_vocab_size engram_n_heads engram_head_dim "
        "engram_compressed_vocab_size dspark_block_size dspark_noise_token_id dspark_target_layer_ids "
        "dspark_markov_rank dspark_n_routed_experts"
    ).split()
    renamed = {
        "dim": "hidden_size",
        "moe_inter_dim": "moe_intermediate_size",
        "n_layers": "num_hidden_layers",
        "n_mtp_layers": "num_nextn_predict_layers",
        "n_heads": "num_attention_heads",
        "n_activated_experts": "num_experts_per_tok",
        "dspark_n_activated_experts": "dspark_num_experts_per_tok",
        "score_func": "scoring_func",
        "route_scale": "routed_scaling_factor",
        "rope_head_dim": "qk_rope_head_dim",
        "norm_eps": "rms_norm_eps",
        "window_size": "sliding_window",
        "kv_source_layers": "kv_source_layer_ids",
        "index_source_layers": "index_source_layer_ids",
        "candidate_source_layer": "candidate_source_layer_id",
        "engram_pad_id": "engram_pad_token_id",
    }
    vision = {
        "vision_n_layers": "num_hidden_layers",
        "vision_dim": "hidden_size",
        "vision_n_heads": "num_attention_heads",
        "vision_inter_dim": "intermediate_size",
        "vision_patch_size": "patch_size",
        "vision_rope_theta": "rope_theta",
        "vision_downsample_ratio": "downsample_ratio",
        "vision_max_n_token": "max_image_tokens",
        "vision_min_pixels": "min_pixels",
        "vision_max_wh_ratio": "max_wh_ratio",
    }
    return {
        **{name: t[name] for name in same},
        **{new: t[old] for new, old in renamed.items()},
        **{new: v[old] for new, old in vision.items()},
        "rope_factor": rope["factor"],
        "beta_fast": rope["beta_fast"],
        "beta_slow": rope["beta_slow"],
        "original_seq_len": rope["original_max_position_embeddings"],
        "image_token_id": config["image_token_id"],
        "dtype": "fp8",
        "expert_dtype": "fp4",
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
