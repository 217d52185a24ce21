"""Mixture of experts on vLLM's runner: it dispatches and reduces, our operators route and compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..layer_plan import LayerPlan
from ..ops import NEVER, route, swiglu
from ..upstream import BaseRouter, FusedMoEFactory, MergedColumnParallelLinear, RoutingMethodType, RowParallelLinear
from .parameters import FloatMatrix, copy_into, empty
from .step import Step


class Router(BaseRouter):  # type: ignore[misc]
    """sqrt(softplus) scores with a selection bias, which is another one for image tokens.

    The last column of the logits is 1 for image tokens: it travels with them when ranks exchange tokens. What vLLM
    passes on as token ids are the same flags as they were here: of use where nothing was exchanged.
    """

    def __init__(self, plan: LayerPlan, gate: Gate, scaling: float) -> None:
        super().__init__(top_k=plan.experts_per_token, global_num_experts=plan.experts)
        self.gate, self.scaling = gate, scaling

    @property
    def routing_method_type(self) -> Any:
        return RoutingMethodType.Custom

    def _compute_routing(
        self, hidden_states: Tensor, router_logits: Tensor, indices_type: Any, *, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        # after an exchange as many rows are the same rows, or padding behind them
        flags = input_ids if input_ids is not None and len(input_ids) == len(router_logits) else None
        biases = self.gate.bias_text, self.gate.bias_image
        weights, ids = route(router_logits, biases[0], self.top_k, self.scaling, biases[1], flags)
        return weights, ids if indices_type is None else ids.to(indices_type)


class Gate(FloatMatrix):
    """Router logits in float32, with one more column that marks image tokens.

    The matrix has a row of zeros for that column, and the biases an entry that is never chosen: nothing is to be put
    together or taken apart in a step.
    """

    bias_text: Tensor
    bias_image: Tensor

    def __init__(self, hidden_size: int, experts: int) -> None:
        super().__init__(hidden_size, experts + 1, torch.float32)  # float32: not widened again in every step
        self.bias, self.bias_vl = empty(experts), empty(experts)
        for name in ("bias_text", "bias_image"):
            self.register_buffer(name, torch.full((experts + 1,), NEVER, dtype=torch.float32), persistent=False)

    def _load(self, parameter: Tensor, value: Tensor, part: int = 0) -> None:
        copy_into(parameter[:-1], value)
        parameter.data[-1].zero_()

    def after_loading(self) -> None:
        """Fill the biases as ``route`` reads them."""
        self.bias_text[:-1].copy_(self.bias)
        self.bias_image[:-1].copy_(self.bias_vl)

    def logits(self, x: Tensor, step: Step) -> Tensor:
        """x [T, D] float32 -> [T, experts + 1] float32."""
        return torch.addmm(step.flag_column(len(self.weight)), x, self.weight.t())


class SharedExpert(nn.Module):
    """The expert every token passes; its ranks' parts are summed with the routed experts'."""

    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        hidden, inner, self.limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
        common = {"bias": False, "quant_config": quant_config}
        # named, and returning biases, as vllm-ascend expects it, which overlaps the parts with the routed experts'
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], prefix=f"{prefix}.gate_up_proj", **common
        )
        self.down_proj = RowParallelLinear(inner, hidden, prefix=f"{prefix}.down_proj", reduce_results=False, **common)

    def act_fn(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]."""
        return swiglu(gate_up, self.limit)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class MoE(nn.Module):
    """Source: spec section 3.8."""

    def __init__(self, config: Any, plan: LayerPlan, dtype: torch.dtype, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.gate = Gate(config.hidden_size, plan.experts)
        self.shared_experts = SharedExpert(config, quant_config, f"{prefix}.shared_experts")
        self.experts = FusedMoEFactory(
            num_experts=plan.experts,
            top_k=plan.experts_per_token,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            quant_config=quant_config,
            prefix=f"{prefix}.experts",
            router=Router(plan, self.gate, config.routed_scaling_factor),
            swiglu_limit=config.swiglu_limit,
            ckpt_names=("w1", "w2", "w3"),
            router_logits_dtype=torch.float32,
            shared_experts=self.shared_experts,
        )

    def forward(self, x: Tensor, wide: Tensor, step: Step) -> Tensor:
        """x [T, D], the same in float32 -> [T, D]."""
        return self.experts(hidden_states=x, router_logits=self.gate.logits(wide, step), input_ids=step.flags)
