"""--speculative-config: what is taken, what is refused and why; and the runner that vLLM must have."""

from __future__ import annotations

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_ascend_dsv41.quant import Weights, convert
from vllm_ascend_dsv41.spec_decode.options import PROPOSER, drafts_with_dspark
from vllm_ascend_dsv41.spec_decode.runner import HOOKS
from vllm_ascend_dsv41.tiny_checkpoint import PRESETS, Sizes, write_checkpoint
from vllm_ascend_dsv41.upstream import require_method

GUIDE = {"method": "dspark", "num_speculative_tokens": 5, "enforce_eager": True}
REFUSED = {
    "another method": (
        {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
        'method "ngram": DeepSeek-V4.1 drafts with the DSpark stages',
    ),
    "part of a block": ({"num_speculative_tokens": 3}, "trained on blocks of 5 tokens .* use 5"),
    "adaptive verification": ({"enable_adaptive_verification": True}, "the V1 runner that serves here verifies whole"),
    "drafts in graphs": ({"enforce_eager": False}, "enforce_eager false: drafts are not captured in graphs"),
    "a cache of its own": ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype: not used by drafts from the target's own"),
    "a length of its own": ({"max_model_len": 64}, "max_model_len: not used by drafts"),
    "local argmax": ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction: not used"),
    "dynamic drafts": ({"num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 16, 5]]}, "per_batch_size: not used"),
    "vLLM: block": ({"num_speculative_tokens": 7}, "must be divisible by n_predict=5"),
    "vLLM: rates": ({"rejection_sample_method": "synthetic"}, "requires exactly one of synthetic_acceptance_rates"),
}


def config(model, options, **more):
    common = {"quantization": "ascend", "tokenizer_mode": "deepseek_v41", "max_model_len": 1024, "enforce_eager": True}
    arguments = EngineArgs(model=str(model), speculative_config=options, **{**common, **more})
    return arguments.create_engine_config()


def test_the_guides_option(converted):
    """V1 runner, our proposer, and nothing of what other methods need: no slots for drafted rows, no lost prefixes."""
    made = config(converted("a", "w8a8"), GUIDE)
    assert drafts_with_dspark(made.speculative_config)
    assert made.speculative_config.model == PROPOSER
    assert not made.use_v2_model_runner
    assert (made.num_speculative_tokens, made.num_lookahead_tokens) == (5, 0)
    assert made.speculative_config.max_num_new_slots_for_drafting == 0
    assert not made.speculative_config.use_eagle_block_drop()
    assert not made.scheduler_config.async_scheduling


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": None},
        {"num_speculative_tokens": 10},
        {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.5},
        {"draft_tensor_parallel_size": 1, "quantization": "ascend"},
    ],
)
def test_options_that_are_taken(converted, options):
    assert drafts_with_dspark(config(converted("a", "w8a8"), {**GUIDE, **options}).speculative_config)


@pytest.mark.parametrize("what", REFUSED)
def test_options_that_are_refused(converted, what):
    options, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        config(converted("a", "w8a8"), {**GUIDE, **options})


def test_another_checkpoints_draft(converted):
    with pytest.raises(ValueError, match="the draft is read from the served checkpoint; leave model out"):
        config(converted("a", "w8a8"), {**GUIDE, "model": str(converted("a", "bf16"))})


def test_a_checkpoint_without_stages(tmp_path):
    sizes = Sizes(**{**PRESETS["a"], "num_nextn_predict_layers": 0})
    write_checkpoint(sizes, tmp_path / "official")
    made = convert(tmp_path / "official", tmp_path / "converted", Weights.BF16)
    with pytest.raises(ValueError, match="has no draft stages"):
        config(made, GUIDE)


def test_hooks_of_the_runner():
    for name, arguments in HOOKS.items():
        require_method(GPUModelRunner, name, arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("propose_draft_token_ids", ("sampled_token_ids",), "arguments scheduler_output, expected sampled_token_ids"),
        ("propose", (), "no such method"),
    ],
)
def test_another_version_of_vllm_is_noticed(name, arguments, message):
    with pytest.raises(ImportError, match=f"{message}.*written for vLLM 0.30.0"):
        require_method(GPUModelRunner, name, arguments)
