"""QuaRot: the rotated model is the same model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from measures import distance, rms
from reference.replay import replay
from torch import Tensor

from vllm_ascend_dsv41.layer_plan import ConfigError
from vllm_ascend_dsv41.quant import Weights, convert, inventory, read_config
from vllm_ascend_dsv41.quant import reference as kernels
from vllm_ascend_dsv41.quant.rotation import Rotation, apply, block, rotation_of
from vllm_ascend_dsv41.reference import Checkpoint, Model, State
from vllm_ascend_dsv41.reference.checkpoint import Linear


class Rotated(Checkpoint):
    """An official checkpoint whose tensors are rotated as they are read, in float32: no rounding hides a mistake."""

    def __init__(self, directory: Path, rule=rotation_of) -> None:
        super().__init__(directory)
        self.config = read_config(directory)
        self.rule = rule
        self.specs = {spec.name: spec for spec in inventory(self.config)}
        self.copies = {"mtp.0.embed.weight": "embed.weight", "mtp.2.head.weight": "head.weight"}

    def __contains__(self, name: str) -> bool:
        return name in self.copies or super().__contains__(name)

    def turned(self, name: str, values: Tensor) -> Tensor:
        rotation = self.rule(self.specs[name], self.config) if name in self.specs else None
        if rotation is None:
            return values
        norm = None if rotation.norm is None else super().vector(rotation.norm).numpy()
        matrix = values.reshape(1, -1) if values.dim() == 1 else values
        return torch.from_numpy(apply(rotation, matrix.numpy().copy(), 0, norm, kernels)).view(values.shape)

    def vector(self, name: str) -> Tensor:
        if name in self.copies:
            return super().vector(self.copies[name])
        return self.turned(name, super().vector(name))

    def linear(self, prefix: str) -> Linear:
        return Linear(self.turned(f"{prefix}.weight", super().linear(prefix).weight), "float")

    def rotation(self) -> Tensor:
        hidden = self.config["text_config"]["hidden_size"]
        return torch.from_numpy(np.kron(np.eye(hidden // 32, dtype=np.float32), block()))


def pictures(model: Model, inputs: dict[str, Tensor]) -> list[Tensor]:
    grid = tuple(inputs["image0.vit_grid"].tolist())
    return [model.vision.align(model.vision.tower(inputs["image0.patches"].float(), grid), grid)]


@pytest.mark.parametrize("case", ["text_0017", "text_0130"])
def test_exact_text(official, golden, case):
    """Logits, draft tokens, draft logits and confidence, against DeepSeek's own code."""
    wanted = golden("a", f"{case}.exact-fp32")
    own = replay(Model(Rotated(official("a"))), wanted)
    assert rms(own.prefill_logits, wanted["prefill_logits"]) < 2e-5
    assert rms(own.decode_logits, wanted["decode_logits"]) < 2e-5
    assert torch.equal(own.spec_output_ids, wanted["spec_output_ids"])


def test_exact_image(official, golden):
    inputs, wanted = golden("a", "image_1.official"), golden("a", "image_1.exact-fp32")
    model = Model(Rotated(official("a")))
    embeddings = model.merge_images(wanted["input_ids"], wanted["token_types"], pictures(model, inputs))
    own = replay(model, wanted, embeddings)
    assert rms(own.prefill_logits, wanted["prefill_logits"]) < 2e-5
    assert torch.equal(own.spec_output_ids, wanted["spec_output_ids"])


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "head.weight",
        "norm.weight",
        r"image_(start|newline|end)",
        r"aligner\.w2\.weight",
        r"aligner\.w2\.bias",
        r"mtp\.0\.main_proj\.weight",
        r"layers\.\d+\.hc_attn_fn",
        r"layers\.\d+\.hc_ffn_fn",
        r"layers\.\d+\.attn_norm\.weight",
        r"layers\.\d+\.ffn_norm\.weight",
        r"layers\.\d+\.engram\.wkv\.weight",
        r"layers\.\d+\.attn\.wq_a\.weight",
        r"layers\.\d+\.attn\.wkv\.weight",
        r"layers\.\d+\.attn\.wo_b\.weight",
        r"layers\.\d+\.attn\.compressor\.wkv\.weight",
        r"layers\.\d+\.attn\.compressor\.wgate\.weight",
        r"layers\.\d+\.attn\.indexer\.weights_proj\.weight",
        r"layers\.\d+\.ffn\.gate\.weight",
        r"layers\.\d+\.ffn\.experts\.\d+\.w[13]\.weight",
        r"layers\.\d+\.ffn\.experts\.\d+\.w2\.weight",
        r"layers\.\d+\.ffn\.shared_experts\.w[13]\.weight",
        r"layers\.\d+\.ffn\.shared_experts\.w2\.weight",
    ],
)
def test_a_tensor_that_is_forgotten_shows(official, golden, name):
    """Each rule alone: without it the model is another one."""

    def forgetful(spec, config) -> Rotation | None:
        return None if re.fullmatch(name, spec.name) else rotation_of(spec, config)

    inputs, wanted = golden("a", "image_1.official"), golden("a", "image_1.exact-fp32")
    model = Model(Rotated(official("a"), forgetful))
    embeddings = model.merge_images(wanted["input_ids"], wanted["token_types"], pictures(model, inputs))
    state = State()
    out = model(wanted["input_ids"], state, embeddings)
    model.observe(out.main_hidden, state)
    error = rms(out.logits, wanted["prefill_logits"])
    whole, whole_state = Model(Rotated(official("a"))), State()
    expected = whole(wanted["input_ids"], whole_state, embeddings_of(whole, wanted, inputs))
    whole.observe(expected.main_hidden, whole_state)
    draft = rms(model.draft(5, state).logits, whole.draft(5, whole_state).logits)
    assert max(error, draft) > 1e-3


def embeddings_of(model: Model, wanted: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
    return model.merge_images(wanted["input_ids"], wanted["token_types"], pictures(model, inputs))


def test_every_rule_is_one_of_those(official):
    """No tensor is rotated that the list above does not name: 23 patterns cover them."""
    config = read_config(official("a"))
    names = [spec.name for spec in inventory(config) if rotation_of(spec, config) is not None]
    listed = test_a_tensor_that_is_forgotten_shows.pytestmark[0].args[1]
    assert all(any(re.fullmatch(pattern, name) for pattern in listed) for name in names)
    assert all(any(re.fullmatch(pattern, name) for name in names) for pattern in listed)


@pytest.mark.parametrize("case", ["text_0040", "text_0130"])
def test_converted(converted, reference, golden, case):
    """As written: BF16 rounds each rotated weight once, which flips a selection here and there."""
    wanted = golden("a", f"{case}.exact-fp32")
    for weights in ("bf16-quarot", "w8a8-quarot"):
        own = replay(reference(converted("a", weights)), wanted)
        found = torch.cat((own.prefill_logits, own.decode_logits))
        d = distance(found, torch.cat((wanted["prefill_logits"], wanted["decode_logits"])))
        assert 1e-4 < d.rms < 0.06, d
        assert d.kl_mean < 0.01, d
        assert (own.spec_output_ids == wanted["spec_output_ids"]).float().mean() > 0.9


def test_hidden_size_must_consist_of_blocks(official, tmp_path, monkeypatch):
    from vllm_ascend_dsv41.quant import rotation

    monkeypatch.setattr(rotation, "BLOCK", 48)
    with pytest.raises(ConfigError, match="hidden_size = 256 is no multiple of 48: convert without --rotate"):
        convert(official("a"), tmp_path / "out", Weights.W8A8, rotate=True)
    assert list(tmp_path.iterdir()) == []
