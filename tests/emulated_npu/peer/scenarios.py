"""What is asked of vllm-ascend's own V4.1 on the emulated NPU, and the figures that come out.

Every scenario runs in a process of its own: `python -m emulated_npu.peer NAME` prints its result as JSON. The same
functions serve the tests and the tables of docs/peer-on-emulated-npu.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import checkpoint
from .engine import DSPARK
from .many_devices import idle_ranks, parallel
from .many_requests import images, prefix_hits, sampling, together
from .measure import Result
from .one_request import accepted, dspark, forced, nested_tables, refused
from .selections import selections


@dataclass(frozen=True)
class Scenario:
    run: Callable[..., Result]
    preset: str = "c"
    weights: str = "bf16"
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 1
    device_type: str = "A2"

    def __call__(self) -> Result:
        started = time.monotonic()
        result = self.run(str(checkpoint.converted(self.preset, self.weights)), self.preset, **self.options)
        return {"seconds": round(time.monotonic() - started, 1), **result}


_V2, _GRAPHS = {"runner": "v2"}, {"graphs": True}
SCENARIOS: dict[str, Scenario] = {}
for _preset, _lengths in (("a", (17, 40, 130, 300)), ("c", (17, 40, 130))):
    for _weights in ("bf16", "w8a8"):
        for _name, _options in (("v1", {}), ("v2", _V2), ("v1-graph", _GRAPHS), ("v2-graph", _V2 | _GRAPHS)):
            SCENARIOS[f"{_preset}-{_weights}-{_name}"] = Scenario(
                forced, _preset, _weights, {"lengths": _lengths, **_options}
            )
SCENARIOS |= {
    "dspark-v1": Scenario(dspark, options={"lengths": (17, 40, 130)}),
    "dspark-v2": Scenario(dspark, options={"lengths": (17,), **_V2}),
    "dspark-v2-corrected": Scenario(dspark, options={"lengths": (17,), "corrected_tap": True, **_V2}),
    "dspark-v1-w8a8": Scenario(dspark, weights="w8a8"),
    "dspark-v1-graph": Scenario(
        dspark,
        options={"lengths": (17,), "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0}, **_GRAPHS},
    ),
    "dspark-v2-graph": Scenario(
        dspark,
        options={
            "lengths": (17,),
            "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", "mode": 0},
            **_GRAPHS,
            **_V2,
        },
    ),
    "dspark-accepted": Scenario(accepted),
    "dspark-set-a": Scenario(refused, "a", options={"speculative_config": DSPARK}),
    "selections-bf16": Scenario(selections, "a"),
    "selections-w8a8": Scenario(selections, "a", "w8a8"),
    "chunks": Scenario(forced, "a", options={"lengths": (40, 130), "max_num_batched_tokens": 37}),
    "blocks-64": Scenario(forced, "a", options={"lengths": (130,), "block_size": 64}),
    "together": Scenario(together, options={"max_num_batched_tokens": 37}),
    "together-v2": Scenario(together, options={"max_num_batched_tokens": 37, **_V2}),
    "preemption": Scenario(
        together, options={"tokens": 12, "border": True, "max_model_len": 256, "num_gpu_blocks_override": 16}
    ),
    "prefix-hits": Scenario(prefix_hits, "a"),
    "sampling-v1": Scenario(sampling),
    "sampling-v2": Scenario(sampling, options=_V2),
    "image-1": Scenario(images, "a"),
    "image-2": Scenario(images, "a", options={"name": "image_2"}),
    "image-1-w8a8": Scenario(images, "a", "w8a8"),
    "tp1": Scenario(parallel),
    "tp2": Scenario(parallel, options={"tensor_parallel_size": 2}, devices=2),
    "ep2": Scenario(parallel, options={"tensor_parallel_size": 2, "enable_expert_parallel": True}, devices=2),
    "ep2-w8a8-a3": Scenario(
        parallel,
        weights="w8a8",
        options={"tensor_parallel_size": 2, "enable_expert_parallel": True},
        devices=2,
        device_type="A3",
    ),
    "tp1-w8a8": Scenario(parallel, weights="w8a8"),
    "dp2": Scenario(idle_ranks, options={"enable_expert_parallel": True}, devices=2),
    "nested-tables": Scenario(nested_tables, weights="w8a8-nested"),
    "a-w8a8-quarot": Scenario(forced, "a", "w8a8-quarot", {"lengths": (17, 40, 130, 300)}),
    "c-w8a8-quarot": Scenario(forced, weights="w8a8-quarot"),
    "dspark-v1-w8a8-quarot": Scenario(dspark, weights="w8a8-quarot"),
}
