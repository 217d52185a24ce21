"""--speculative-config: what of it is honoured, and how vLLM's V1 runner is given our drafter."""

from __future__ import annotations

import logging
from dataclasses import MISSING, fields
from typing import Any

from .. import upstream  # by name, when used: the platform is asked for while vLLM is still being imported

PROPOSER = "vllm_ascend_dsv41.spec_decode.proposer.DSparkProposer"
EXAMPLE = '--speculative-config \'{"method": "dspark", "num_speculative_tokens": 5, "enforce_eager": true}\''

#: Fields that mean nothing to a draft that is part of the target model; anything but their default is refused.
NOT_OURS = (
    "attention_backend",
    "code_revision",
    "disable_padded_drafter_batch",
    "draft_load_config",
    "dspark_draft_topk",
    "index_share_for_mtp_iteration",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
    "num_speculative_tokens_per_batch_size",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "revision",
    "use_heterogeneous_vocab",
    "use_local_argmax_reduction",
)


class SpeculativeOptionError(ValueError):
    """A speculative option that cannot be honoured, with the reason and the remedy."""


def drafts_with_dspark(speculative_config: Any) -> bool:
    """Whether ``accept`` has handed the configuration to our proposer."""
    return speculative_config is not None and speculative_config.model == PROPOSER


def accept(vllm_config: Any) -> None:
    """Check --speculative-config and name our proposer in it: for our platforms, before vLLM validates it.

    vLLM 0.30.0 has DSpark in its V2 runner only and refuses it for V1. Its V1 runner asks a class of the user's own
    for drafts under method ``custom_class``; that is what the method becomes here. The rules of other methods that
    ``dspark`` would switch on go with it: slots for drafted rows, of which we write none, and leaving the last block
    of a prefix out of the cache, which holds nothing that depends on drafts. Raises SpeculativeOptionError.
    """
    config = vllm_config.speculative_config
    if config is None or drafts_with_dspark(config):
        return
    _refuse(vllm_config, config)
    if config.rejection_sample_method == "synthetic":
        logging.getLogger("vllm.dsv41").warning(
            "--speculative-config, rejection_sample_method synthetic: drafted tokens are accepted at the given rates "
            "whatever they say; the text is not the model's. For measurements only"
        )
    config.method, config.model = "custom_class", PROPOSER
    config.draft_model_config, config.draft_parallel_config = config.target_model_config, config.target_parallel_config
    config.parallel_drafting = False  # vLLM would put the draft's tokens into the target's batch
    vllm_config.scheduler_config.async_scheduling = False  # the proposer needs the sampled tokens on the host


def _refuse(vllm_config: Any, config: Any) -> None:
    target = vllm_config.model_config
    hf_config, ranks = target.hf_config, vllm_config.parallel_config.tensor_parallel_size
    stages = getattr(hf_config, "num_nextn_predict_layers", 0)
    block, tokens = getattr(hf_config, "dspark_block_size", 0), config.num_speculative_tokens
    defaults = {field.name: _default(field) for field in fields(upstream.SpeculativeConfig)}
    foreign = [name for name in NOT_OURS if getattr(config, name) not in (defaults[name], False, 0)]
    refused = [
        (
            config.method != "dspark",
            f'method "{config.method}": DeepSeek-V4.1 drafts with the DSpark stages of its checkpoint; use {EXAMPLE}',
        ),
        (not stages, f"the checkpoint at {target.model} has no draft stages (num_nextn_predict_layers); leave it out"),
        (
            config.model != target.model,
            f"model {config.model}: the draft is read from the served checkpoint; leave model out",
        ),
        (
            bool(stages) and tokens % max(block, 1) != 0,
            f"num_speculative_tokens {tokens}: the draft was trained on blocks of {block} tokens (dspark_block_size) "
            f"and drafts whole blocks; use {block}",
        ),
        (
            config.enable_adaptive_verification,
            "enable_adaptive_verification: vLLM decides the length of each draft on the device for this, in its V2 "
            "runner; the V1 runner that serves here verifies whole blocks. Leave it out",
        ),
        (
            config.enforce_eager is False,
            "enforce_eager false: drafts are not captured in graphs; set it to true or leave it out",
        ),
        (
            config.draft_tensor_parallel_size not in (None, ranks),
            f"draft_tensor_parallel_size {config.draft_tensor_parallel_size}: the draft shares the target's ranks; "
            f"leave it out (it is {ranks})",
        ),
        (
            config.quantization not in (None, target.quantization),
            f"quantization {config.quantization}: the draft is part of the checkpoint, whose quantisation is "
            f"{target.quantization}",
        ),
        (bool(foreign), f"{', '.join(foreign)}: not used by drafts from the target's own checkpoint; leave it out"),
    ]
    for condition, message in refused:
        if condition:
            raise SpeculativeOptionError(f"--speculative-config, {message}")


def _default(field: Any) -> Any:
    default = field.default
    default = getattr(default, "default", default)  # pydantic's Field
    return None if default is MISSING else default
