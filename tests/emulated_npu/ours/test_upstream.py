"""What our platform, worker and runner take from vLLM and vllm-ascend is there, as they expect it."""

import importlib

import pytest

from emulated_npu.ours.trace import PLUGINS

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(fresh=True)]


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", PLUGINS)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


def test_names_and_methods(monkeypatch):
    from vllm.platforms import current_platform

    assert type(current_platform).__name__ == "NpuPlatform"
    from vllm_ascend.utils import adapt_patch

    adapt_patch()
    from vllm_ascend_dsv41 import upstream

    for name in upstream.ASCEND_NAMES:
        assert getattr(upstream, name) is not None
    npu = importlib.import_module("vllm_ascend_dsv41.worker.npu")
    for name, arguments in npu.HOOKS.items():
        upstream.require_method(npu.NpuModelRunner, name, arguments, "vllm_ascend")
    monkeypatch.setattr(npu.NPUModelRunner, "_get_drafter", lambda self, config: None)
    with pytest.raises(ImportError, match=r"_get_drafter: arguments config, expected"):
        upstream.require_method(npu.NpuModelRunner, "_get_drafter", ("vllm_config",), "vllm_ascend")


REFUSED = [
    ({"pipeline_parallel_size": 2}, "Pipeline parallelism is not supported"),  # by vLLM
    ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "--decode-context-parallel-size"),
    ({"enable_lora": True}, "--enable-lora"),
    ({"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2}, "--enable-eplb"),
    ({"block_size": 16}, "--block-size 16"),
    ({"engram_config": {"embedding_across_dp": True}}, "embedding_across_dp"),
    ({"additional_config": {"enable_dsa_cp": True}}, "enable_dsa_cp"),
    ({"additional_config": {"enable_fused_mc2": 1}}, "enable_fused_mc2"),
    ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
    ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}, "enforce_eager": False}, "cudagraph_mode PIECEWISE"),
    ({"additional_config": {"dsv41": {"engram": {"chunk_mib": 3}}}}, "chunk_mib is 3"),
]


def configured(model, **options):
    """The configuration as vLLM makes it; no engine."""
    from vllm import EngineArgs

    given = {"quantization": "ascend", "max_model_len": 512, "skip_tokenizer_init": True, "enforce_eager": True}
    return EngineArgs(model=str(model), **{**given, **options}).create_engine_config()


def test_what_is_refused_and_what_is_set(converted, monkeypatch):
    model = converted("a", "w8a8")
    accepted = []
    for options, message in REFUSED:
        try:
            configured(model, **options)
        except Exception as error:
            if message in str(error):
                continue
            accepted.append((options, str(error)[:300]))
        else:
            accepted.append((options, "accepted"))
    assert not accepted
    for name, value, message in (
        ("VLLM_USE_V2_MODEL_RUNNER", "1", "model runner V2"),
        ("VLLM_ASCEND_ENABLE_FLASHCOMM1", "1", "sequence parallelism is not built"),
        ("DSV41_OPS", "moe_w8a8=reference", "vllm-ascend's experts read the same weights"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(Exception, match=message):
                configured(model)
    config = configured(
        model,
        enforce_eager=False,
        additional_config={"dsv41": {"engram": {"chunk_mib": 2}}, "enable_cpu_binding": False},
    )
    assert config.parallel_config.worker_cls == "vllm_ascend_dsv41.worker.npu.NpuWorker"
    assert config.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
    assert not config.scheduler_config.async_scheduling  # vLLM's default would hide generated tokens from Engram
    assert config.cache_config.block_size == 128
    assert config.additional_config["enable_cpu_binding"] is False
    assert "dsv41" not in config.additional_config  # vllm-ascend refuses keys it does not know
    from vllm_ascend_dsv41.engram import EngramOptions

    assert EngramOptions.of(config.engram_config, config.additional_config).chunk_mib == 2
    drafting = configured(
        model, speculative_config={"method": "dspark", "num_speculative_tokens": 5}, max_num_seqs=8, enforce_eager=False
    )
    assert drafting.compilation_config.max_cudagraph_capture_size >= 8 * 6
