"""The recipes' command lines through vLLM's parser and our platform, under the real vllm-ascend: what it refuses or
changes shows here and not after half an hour on a server."""

import pytest

from emulated_npu.ours.trace import PLUGINS
from vllm_ascend_dsv41.deploy.launch import Node, command
from vllm_ascend_dsv41.deploy.plan.device import capture_sizes
from vllm_ascend_dsv41.deploy.recipe import load

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu(fresh=True)]


@pytest.mark.parametrize(("name", "rank"), [("a3x2", 0), ("a3x2", 1), ("a2x4", 3), ("a3x1-offload", 0)])
def test_the_configuration_is_what_the_recipe_says(name, rank, converted, monkeypatch):
    # a tiny model's length, and one rank where there are eight: it has fewer heads
    recipe = load(name, ["max-model-len=1024", "tensor_parallel_size=1"])
    for key, item in recipe.environment.items():
        monkeypatch.setenv(key, str(item.value))
    monkeypatch.setenv("VLLM_PLUGINS", PLUGINS)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    node = Node(rank, "127.0.0.1", "127.0.0.1" if rank == 0 else "127.0.0.2", "lo")
    arguments = command(recipe, node, str(converted("a", "w8a8"))).arguments
    parser = make_arg_parser(FlexibleArgumentParser())
    current_platform.pre_register_and_update(parser)
    args = parser.parse_args(arguments)
    args.model = args.model_tag
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=args.headless)
    place = recipe.topology
    assert config.parallel_config.worker_cls == "vllm_ascend_dsv41.worker.npu.NpuWorker"
    assert config.parallel_config.data_parallel_size == place.number("data_parallel_size")
    assert config.parallel_config.data_parallel_size_local == place.number("data_parallel_size_local")
    assert config.parallel_config.enable_expert_parallel
    assert config.scheduler_config.max_num_seqs == recipe.flag("max-num-seqs")
    assert config.scheduler_config.async_scheduling is False
    assert config.compilation_config.cudagraph_mode.name == "FULL_DECODE_ONLY"
    assert config.cache_config.block_size == 128
    assert config.engram_config.cpu_offload is recipe.flag("engram-config")["cpu_offload"]
    assert config.speculative_config.num_speculative_tokens == 5
    assert not config.model_config.trust_remote_code
    # the runner rounds each size up to whole requests: what the plan shows
    sizes = {-(-size // 6) * 6 for size in config.compilation_config.cudagraph_capture_sizes}
    assert sorted(sizes) == capture_sizes(recipe.flag("max-num-seqs"), 5)
