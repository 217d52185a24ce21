"""Where the Engram tables live, and when their rows are looked up, does not show in what is served."""

from __future__ import annotations

import pytest
import torch

from serving.harness import Engine

MODES = {
    "device memory": ({"cpu_offload": False}, {}),
    "host memory, looked up ahead": ({"cpu_offload": True}, {"prefetch": True, "load_threads": 2, "use_thp": True}),
}


@pytest.fixture(scope="module")
def wanted(engine, prompts):
    """Logits with all options as they are by default."""
    return [result.matrix() for result in engine("a", "w8a8").run(prompts(3, 40, 130, 300, seed=31), 8)]


@pytest.mark.parametrize("mode", MODES)
def test_equal_logits(engine, prompts, wanted, mode):
    config, own = MODES[mode]
    served = engine("a", "w8a8", engram_config=config, additional_config={"dsv41": {"engram": own}})
    memory = served.runner.model.model.engram
    assert memory.tables[0].kind == ("host memory" if config["cpu_offload"] else "device memory")
    assert memory._prefetcher._on == own.get("prefetch", False)
    for result, logits in zip(served.run(prompts(3, 40, 130, 300, seed=31), 8), wanted, strict=True):
        assert torch.equal(result.matrix(), logits)


REFUSED = {
    "an option of vLLM's under ours": ({}, {"cpu_offload": True}, "it belongs to --engram-config"),
    "an unknown option": ({}, {"prefetching": True}, "unknown option 'prefetching'"),
    "sharing without data parallelism": ({"dp_shared_memory": True}, {}, "requires data_parallel_size > 1"),
    "sharing without host memory": ({"dp_shared_memory": True, "cpu_offload": False}, {}, "requires cpu_offload"),
    "a field that this vLLM lacks": ({"use_thp": True}, {}, "use_thp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_are_refused_before_workers_start(converted, case):
    config, own, text = REFUSED[case]
    with pytest.raises(ValueError, match=text):
        Engine(str(converted("a", "w8a8")), engram_config=config, additional_config={"dsv41": {"engram": own}})


@pytest.mark.parametrize(("size", "local"), [(5, 5), (16, 16)])
def test_columns_that_cannot_be_divided_are_refused(converted, size, local):
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(converted("a", "w8a8")),
        quantization="ascend",
        data_parallel_size=size,
        data_parallel_size_local=local,
        engram_config={"embedding_across_dp": True},
    )
    with pytest.raises(ValueError, match=rf"hash columns cannot be divided among {size} ranks"):
        arguments.create_engine_config()
