"""Deliberate mistakes: each must be found, or the comparison with the golden data is worth nothing.

The 22 of golden/README.md, with the size of the change it lists, then the traps of spec section 3.12
that are not among them. Every test puts one mistake into the reference and asserts that the
comparison which the right code passes (test_golden.py) then fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from measures import rms
from torch import Tensor

from vllm_ascend_dsv41.reference import Checkpoint, Config, Grid, Model, State, numerics
from vllm_ascend_dsv41.reference import checkpoint as checkpoint_module
from vllm_ascend_dsv41.reference import engram as engram_module
from vllm_ascend_dsv41.reference import model as m

FOUND = 1e-3  # a hundred times the tolerance that the right code keeps


class Case:
    """Builds models with a mistake in them and measures how far their logits lie off."""

    def __init__(self, directory, golden, monkeypatch: pytest.MonkeyPatch, image_embeddings: Callable) -> None:
        self.directory, self.patch = directory, monkeypatch
        self.text = golden("a", "text_0130.exact-fp32")
        self.image = golden("a", "image_1.exact-fp32")
        self._embeddings = image_embeddings

    def model(self, **config: object) -> Model:
        """A model of the checkpoint, with changed config numbers."""
        return Model(Checkpoint(self.directory), dataclasses.replace(Config.load(self.directory), **config))

    def text_error(self, model: Model) -> float:
        """Relative RMS of the logits of a 130-token prompt and its decode steps."""
        tokens = torch.cat((self.text["input_ids"], self.text["decode_tokens"]))
        wanted = torch.cat((self.text["prefill_logits"], self.text["decode_logits"]))
        return rms(model(tokens, State()).logits, wanted)

    def decode_error(self, model: Model) -> float:
        """The same for decode steps alone, one token at a time."""
        state = State()
        model(self.text["input_ids"], state)
        logits = [model(token[None], state).logits for token in self.text["decode_tokens"]]
        return rms(torch.cat(logits), self.text["decode_logits"])

    def image_error(self, model: Model) -> float:
        """The same for a prompt with a picture."""
        embeddings = self._embeddings(model)
        return rms(model(self.image["input_ids"], State(), embeddings).logits, self.image["prefill_logits"])


@pytest.fixture
def case(official, golden, monkeypatch):
    inputs, wanted = golden("a", "image_1.official"), golden("a", "image_1.exact-fp32")

    def embeddings(model: Model) -> Tensor:
        grid = tuple(inputs["image0.vit_grid"].tolist())
        picture = model.vision.align(model.vision.tower(inputs["image0.patches"].float(), grid), grid)
        return model.merge_images(wanted["input_ids"], wanted["token_types"], [picture])

    return Case(official("a"), golden, monkeypatch, embeddings)


def test_without_a_mistake_nothing_is_found(case):
    model = case.model()
    assert case.text_error(model) < 1e-5
    assert case.decode_error(model) < 1e-5
    assert case.image_error(model) < 1e-5


# ---- the 22 mistakes of golden/README.md -------------------------------------------------------


def test_rms_norm_eps_1e_6(case):
    assert case.text_error(case.model(rms_norm_eps=1e-6)) > 0.01


def test_hc_comb_transposed(case):
    right = m.sinkhorn
    case.patch.setattr(m, "sinkhorn", lambda *args: right(*args).transpose(1, 2))
    assert case.text_error(case.model()) > 0.01


def test_hc_pre_not_delayed(case):
    """Every collapse uses its own sublayer's coefficients."""

    def call(self: m.Block, streams: Tensor, pre: Tensor, step: m.Step, attention: object = None):
        own, post, comb = self.hc_attn(streams)
        y = self.attn(m.rms_norm(m.collapse(streams, own), self.attn_norm, 1e-20), step)
        streams = m.expand(y, streams, post, comb)
        own, post, comb = self.hc_ffn(streams)
        y = self.ffn(m.rms_norm(m.collapse(streams, own), self.ffn_norm, 1e-20), step)
        return m.expand(y, streams, post, comb), own

    case.patch.setattr(m.Block, "__call__", call)
    assert case.text_error(case.model()) > 0.01


def test_sinkhorn_3_iterations(case):
    assert case.text_error(case.model(hc_sinkhorn_iters=3)) > 0.005


def test_no_attention_sink(case):
    model = case.model()
    for block in model.layers:
        block.attn.sink = torch.full_like(block.attn.sink, -torch.inf)
    assert case.text_error(model) > 0.01


def test_no_yarn(case):
    rope = Config.load(case.directory).compressed_rope
    assert case.text_error(case.model(compressed_rope=dataclasses.replace(rope, factor=1.0))) > 0.01


def test_no_swiglu_clamp(case):
    assert case.text_error(case.model(swiglu_limit=1e9)) > 0.01


def test_gate_bias_ignored(case):
    model = case.model()
    for block in model.layers:
        block.ffn.bias = torch.zeros_like(block.ffn.bias)
    assert case.text_error(model) > 0.01


def test_routed_scaling_missing(case):
    assert case.text_error(case.model(routed_scaling_factor=1.0)) > 0.01


def test_engram_scale_groups_swapped(case):
    right = Checkpoint.table_rows

    def swapped(self: Checkpoint, prefix: str, ids: Tensor) -> Tensor:
        rows = right(self, prefix, ids)
        scale = numerics.decode_e8m0(self.raw(f"{prefix}.scale"))[ids]
        return (rows.unflatten(1, (-1, 32)) / scale[..., None] * scale.flip(1)[..., None]).flatten(1)

    case.patch.setattr(Checkpoint, "table_rows", swapped)
    assert case.text_error(case.model()) > 0.1


def _with_linear(case: Case, change: Callable[[Checkpoint, str, m.Linear], Tensor | None]) -> Model:
    right = Checkpoint.linear

    def linear(self: Checkpoint, prefix: str) -> m.Linear:
        made = right(self, prefix)
        changed = change(self, prefix, made)
        return made if changed is None else dataclasses.replace(made, weight=changed)

    case.patch.setattr(Checkpoint, "linear", linear)
    return case.model()


def test_expert_scale_groups_reversed(case):
    def change(self: Checkpoint, prefix: str, made: m.Linear) -> Tensor | None:
        if ".experts." not in prefix:
            return None
        scale = numerics.decode_e8m0(self.raw(f"{prefix}.scale")).flip(1)
        return numerics.decode_e2m1(self.raw(f"{prefix}.weight")) * scale.repeat_interleave(32, 1)

    assert case.text_error(_with_linear(case, change)) > 0.1


def test_attention_fp8_scale_rows_reversed(case):
    def change(self: Checkpoint, prefix: str, made: m.Linear) -> Tensor | None:
        if ".attn.w" not in prefix:
            return None
        scale = numerics.decode_e8m0(self.raw(f"{prefix}.scale")).flip(0)
        return self.raw(f"{prefix}.weight").float() * numerics.spread(scale, tuple(made.weight.shape), (32, 32))

    assert case.text_error(_with_linear(case, change)) > 0.05


def test_fp4_nibbles_swapped(case):
    right = checkpoint_module.decode_e2m1
    case.patch.setattr(
        checkpoint_module, "decode_e2m1", lambda packed: right(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    )
    assert case.text_error(case.model()) > 0.1


def test_second_top_k_stage_skipped(case):
    assert case.text_error(case.model(candidate_source_layer_id=-1)) > 0.005


def test_index_topk_doubled(case):
    assert case.text_error(case.model(index_topk=32)) > 0.01


def test_no_inverse_rope_on_attention_output(case):
    right = m.rotate
    case.patch.setattr(m, "rotate", lambda x, p, rope, inverse=False: x if inverse else right(x, p, rope))
    assert case.text_error(case.model()) > 0.01


def test_split_half_instead_of_interleaved_rope(case):
    def split_half(x: Tensor, positions: Tensor, rope, inverse: bool = False) -> Tensor:
        angle = positions.float()[:, None] * m.rope_frequencies(rope)
        angle = angle.view(-1, *(1,) * (x.dim() - 2), rope.dim // 2)
        cos, sin = angle.cos(), -angle.sin() if inverse else angle.sin()
        low, high = x[..., -rope.dim :].chunk(2, dim=-1)
        return torch.cat((x[..., : -rope.dim], low * cos - high * sin, low * sin + high * cos), dim=-1)

    case.patch.setattr(m, "rotate", split_half)
    assert case.text_error(case.model()) > 0.01


def test_window_one_shorter(case):
    assert case.text_error(case.model(sliding_window=15)) > 0.01


def test_engram_pad_id_wrong(case, golden):
    """Seen at the first tokens only: a prompt of five."""
    short = golden("a", "text_0005.exact-fp32")
    model = case.model()
    assert rms(model(short["input_ids"], State()).logits, short["prefill_logits"]) < 1e-5
    model.engram_pad = 0
    assert rms(model(short["input_ids"], State()).logits, short["prefill_logits"]) > 0.05


def test_engram_k_weight_ignored(case):
    model = case.model()
    for block in model.layers:
        if block.engram is not None:
            block.engram.k_weight = torch.ones_like(block.engram.k_weight)
    assert case.text_error(model) > 0.01


def test_image_gate_bias_instead_of_bias_vl(case):
    model = case.model()
    for block in model.layers:
        block.ffn.bias_vl = block.ffn.bias
    assert case.text_error(model) < 1e-5  # text cannot see it
    assert case.image_error(model) > 0.01


def test_image_engram_gate_not_masked(case):
    right = m.Engram.inject
    case.patch.setattr(m.Engram, "inject", lambda s, x, rows, image: right(s, x, rows, torch.zeros_like(image)))
    assert case.image_error(case.model()) > 0.1


# ---- spec section 3.12, what is not among those above ------------------------------------------


def test_trap_2_query_norm_kept(case):
    right = m.Attention.queries

    def queries(self: m.Attention, x: Tensor, positions: Tensor):
        qr, q = right(self, x, positions)
        return qr, m.rms_norm(q, torch.ones(q.shape[-1]), 1e-6)

    case.patch.setattr(m.Attention, "queries", queries)
    assert case.text_error(case.model()) > FOUND


def test_trap_4_first_collapse_not_of_stream_0_alone(case):
    """The released model hides this one: its streams are equal until layer 1 and RMSNorm removes the scale.
    With streams that differ, as behind an Engram in layer 0, it shows."""
    model = case.model()
    streams, pre = model._spread(model.embed_tokens(case.text["input_ids"]))
    assert pre.tolist() == [[1.0, 0.0, 0.0, 0.0]] * len(pre)
    different = streams * torch.tensor([1.0, -0.5, 2.0, 0.25])[None, :, None] + streams.roll(1, 0)
    step = m.Step(torch.arange(len(pre)), State(), m.ignore, torch.zeros(len(pre), dtype=torch.bool))
    right = model.layers[0](different, pre, step)[0]
    step = m.Step(torch.arange(len(pre)), State(), m.ignore, torch.zeros(len(pre), dtype=torch.bool))
    assert rms(model.layers[0](different, torch.full_like(pre, 0.25), step)[0], right) > FOUND


def test_trap_5_engram_scales_as_tiles(case):
    """Engram scales read as 32 x 32 tiles instead of one per 32 values of a row."""
    right = Checkpoint.table_rows

    def tiled(self: Checkpoint, prefix: str, ids: Tensor) -> Tensor:
        rows = right(self, prefix, ids)
        scale = numerics.decode_e8m0(self.raw(f"{prefix}.scale"))
        own, tile = scale[ids], scale[ids // 32]
        return (rows.unflatten(1, (-1, 32)) / own[..., None] * tile[..., None]).flatten(1)

    case.patch.setattr(Checkpoint, "table_rows", tiled)
    assert case.text_error(case.model()) > FOUND


def test_trap_6_compressed_position_without_ratio(case):
    def publish(self: m.Attention, x: Tensor, step: m.Step) -> None:
        ratio, self.compressor.ratio = self.ratio, self.ratio
        state, layer = step.state, self.layer
        pending = torch.cat((state.open_group[layer], x)) if layer in state.open_group else x
        whole = len(pending) // ratio * ratio
        state.open_group[layer] = pending[whole:]
        latents = self.compressor(pending[:whole])
        first = len(state.compressed.get(layer, ()))
        positions = torch.arange(first, first + len(latents))  # forgot "* ratio"
        m._append(state.compressed, layer, m.rotate(latents, positions, self.rope))
        keys = m.rms_norm(self.arithmetic.linear(latents, self.index_wk), self.index_k_norm, 1e-20)
        m._append(state.index_keys, layer, m.rotate(keys, positions, self.rope))

    case.patch.setattr(m.Attention, "publish", publish)
    assert case.text_error(case.model()) > FOUND


def test_trap_6_index_key_from_the_rotated_latent(case):
    right = m.Compressor.__call__
    patched = case.patch

    def publish(self: m.Attention, x: Tensor, step: m.Step) -> None:
        state, layer = step.state, self.layer
        pending = torch.cat((state.open_group[layer], x)) if layer in state.open_group else x
        whole = len(pending) // self.ratio * self.ratio
        state.open_group[layer] = pending[whole:]
        latents = right(self.compressor, pending[:whole])
        first = len(state.compressed.get(layer, ()))
        positions = torch.arange(first, first + len(latents)) * self.ratio
        rows = m.rotate(latents, positions, self.rope)
        m._append(state.compressed, layer, rows)
        keys = m.rms_norm(self.arithmetic.linear(rows, self.index_wk), self.index_k_norm, 1e-20)
        m._append(state.index_keys, layer, m.rotate(keys, positions, self.rope))

    patched.setattr(m.Attention, "publish", publish)
    assert case.text_error(case.model()) > FOUND


def test_trap_10_rope_on_the_leading_dimensions(case):
    right = m.rotate

    def leading(x: Tensor, positions: Tensor, rope, inverse: bool = False) -> Tensor:
        return right(x.roll(-rope.dim, -1), positions, rope, inverse).roll(rope.dim, -1)

    case.patch.setattr(m, "rotate", leading)
    assert case.text_error(case.model()) > FOUND


@pytest.mark.parametrize("code", [0, 255])
def test_trap_11_e8m0_by_bit_shift(code):
    """The shift gives 0 and infinity where the format has 2 ** -127 and NaN."""
    shifted = (torch.tensor([code], dtype=torch.int32) << 23).view(torch.float32)
    right = numerics.decode_e8m0(torch.tensor([code], dtype=torch.uint8))
    assert not torch.equal(shifted, right)
    assert right.isnan() if code == 255 else right == 2.0**-127


def test_trap_12_ties_to_the_largest_index():
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]])
    assert m.top_k(scores, 2).tolist() == [[1, 2]]


def test_trap_13_tail_of_a_chunk_dropped(case):
    """A ratio-2 compressor that forgets the odd token of a call."""
    right = m.Attention.publish

    def publish(self: m.Attention, x: Tensor, step: m.Step) -> None:
        right(self, x, step)
        if self.layer in step.state.open_group and self.ratio == 2:
            step.state.open_group[self.layer] = step.state.open_group[self.layer] * 0

    case.patch.setattr(m.Attention, "publish", publish)
    assert case.decode_error(case.model()) > FOUND


def test_trap_13_lookback_lost_between_calls(case):
    right = Model.__call__

    def call(self: Model, tokens: Tensor, state: State, *args, **kwargs):
        state.compressed_ids = torch.full_like(state.compressed_ids, engram_module.DEAD)
        return right(self, tokens, state, *args, **kwargs)

    case.patch.setattr(Model, "__call__", call)
    assert case.decode_error(case.model()) > FOUND


def test_trap_14_activations_rounded_in_front_of_wo_a(case, golden, reference):
    """The official code keeps ``wo_a`` in BF16: no FP8 activations there. Layer 0 alone, on the recorded input."""
    recorded = golden("a", "text_0017.official")
    model = reference(case.directory, Grid.MX, torch.bfloat16)
    attention = model.layers[0].attn

    def error() -> float:
        step = m.Step(torch.arange(17), State(), m.ignore, torch.zeros(17, dtype=torch.bool))
        return rms(attention(recorded["layer0.attn_in"], step), recorded["layer0.attn_out"])

    right = error()
    assert right < 0.015
    case.patch.setattr(m, "rotate", _round_after(m.rotate))  # what comes out of it goes into wo_a
    assert error() > 2 * right


def _round_after(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def rounded(x: Tensor, positions: Tensor, rope: object, inverse: bool = False) -> Tensor:
        turned = rotate(x, positions, rope, inverse)
        return numerics.round_mxfp8(turned) if inverse else turned

    return rounded


def test_trap_15_head_in_bf16(case):
    model = case.model()
    right = model(case.text["input_ids"], State()).logits
    hidden = torch.linalg.lstsq(model.head, right.T).solution.T  # what the head was applied to
    rounded = (hidden.bfloat16() @ model.head.bfloat16().T).float()
    assert rms(rounded, right) > FOUND


def test_trap_16_draft_taps_layer_outputs(case, golden):
    wanted = golden("a", "text_0040.exact-fp32")
    model, outputs = case.model(), []
    right = m.Block.__call__

    def call(self: m.Block, streams: Tensor, pre: Tensor, step: m.Step, attention: object = None):
        after = right(self, streams, pre, step, attention)
        if self.layer in model.config.dspark_target_layer_ids:
            outputs.append(after[0].mean(1))
        return after

    case.patch.setattr(m.Block, "__call__", call)
    found = model(wanted["input_ids"], State()).main_hidden
    assert rms(found, wanted["prefill_main_hidden"]) < 1e-5
    assert rms(torch.cat(outputs, dim=-1), wanted["prefill_main_hidden"]) > FOUND


def test_trap_18_image_tokens_not_dead_in_n_grams(case):
    model = case.model()
    image = int(model.token_map[model.config.image_token_id])
    right = engram_module.hash_rows
    case.patch.setattr(
        engram_module, "hash_rows", lambda ids, *rest: right(ids.where(ids != engram_module.DEAD, image), *rest)
    )
    assert case.image_error(model) > FOUND


def test_trap_20a_scale_byte_read_as_a_number(case):
    """Code 120 means 2 ** -7, not 120.0."""
    case.patch.setattr(checkpoint_module, "decode_e8m0", lambda codes: codes.view(torch.uint8).float())
    assert not case.text_error(case.model()) < FOUND


def test_trap_softplus_without_its_tail():
    """Naive log(1 + exp(x)) loses the scores of unlikely experts."""
    logits = torch.tensor([-20.0, -30.0])
    assert F.softplus(logits).sqrt().gt(0).all()
    assert (1 + logits.exp()).log().sqrt()[1] == 0


def test_trap_index_keys_of_another_source(case):
    """Found while the golden data were made: a step that leaves a ratio-2 group open must still score
    against the layer's own keys, not against those published last."""
    right = m.Attention.select

    def select(self: m.Attention, x: Tensor, qr: Tensor, step: m.Step) -> None:
        if len(x) == 1 and self.ratio == 2 and int(step.positions[0]) % 2 == 0:
            keys = step.state.index_keys
            own = keys[self.layer]
            keys[self.layer] = keys[5][: len(own)]
            right(self, x, qr, step)
            keys[self.layer] = own
        else:
            right(self, x, qr, step)

    case.patch.setattr(m.Attention, "select", select)
    assert case.decode_error(case.model()) > FOUND
