"""Single functions of the reference against DeepSeek's own, on the unit vectors of golden/a."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from vllm_ascend_dsv41.reference import Config, Grid, State
from vllm_ascend_dsv41.reference import engram as engram_functions
from vllm_ascend_dsv41.reference.config import Rope
from vllm_ascend_dsv41.reference.model import (
    Step,
    attend,
    candidate_mask,
    collapse,
    expand,
    ignore,
    rms_norm,
    rope_frequencies,
    rotate,
    split_mixes,
)
from vllm_ascend_dsv41.reference.numerics import (
    decode_e2m1,
    decode_e8m0,
    power_of_two_scale,
    round_mxfp4,
    round_mxfp8,
    round_nvfp4,
)


@pytest.fixture(scope="module")
def unit(golden):
    return lambda name: golden("a", f"unit_{name}")


@pytest.fixture(scope="module")
def model(official, reference):
    return reference(official("a"), Grid.MX, torch.bfloat16)


@pytest.fixture(scope="module")
def exact(official, reference):
    return reference(official("a"), Grid.EXACT, torch.bfloat16)


def within_ulp(found: torch.Tensor, wanted: torch.Tensor, ulps: int = 2) -> bool:
    """Equal up to ``ulps`` BF16 units in the last place of the row's largest value."""
    ulp = 2.0 ** (torch.floor(torch.log2(wanted.float().abs().amax(-1, keepdim=True).clamp_min(1e-30))) - 7)
    return bool(((found.float() - wanted.float()).abs() <= ulps * ulp).all())


def test_quantisers(unit):
    u = unit("quantizers")
    x = u["x"]
    assert torch.equal(round_mxfp8(x), u["act_quant.ue8m0.roundtrip"])
    assert torch.equal(round_mxfp4(x), u["fp4.e8m0_32.roundtrip"])
    assert torch.equal(round_nvfp4(x), u["fp4.e4m3_16.roundtrip"])
    scale = power_of_two_scale(x.float().unflatten(-1, (-1, 32)).abs().amax(-1).clamp_min(1e-4), 448.0)
    assert torch.equal(scale, decode_e8m0(u["act_quant.ue8m0.scale"]))


def test_packed_codes_decode_to_the_round_trip(unit):
    u = unit("quantizers")
    values = decode_e2m1(u["fp4.e8m0_32.codes"]) * decode_e8m0(u["fp4.e8m0_32.scale"]).repeat_interleave(32, 1)
    assert torch.equal(values.bfloat16(), u["fp4.e8m0_32.roundtrip"])
    values = decode_e2m1(u["fp4.e4m3_16.codes"]) * u["fp4.e4m3_16.scale"].float().repeat_interleave(16, 1)
    assert torch.equal(values.bfloat16(), u["fp4.e4m3_16.roundtrip"])


def test_e8m0_codes():
    codes = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    values = decode_e8m0(codes)
    assert values[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert values[4].isnan()


def test_linear(unit, model, exact):
    u = unit("linear")
    wq_a, w1 = model.layers[0].attn.wq_a, model.layers[0].ffn._weights("experts.1")[0]
    assert torch.equal(wq_a.weight, u["fp8.weight_dequantized"])
    assert torch.equal(w1.weight, u["fp4.weight_dequantized"])
    for own, name in ((model, "official"), (exact, "exact-weights")):
        assert within_ulp(own.arithmetic.linear(u["x"], wq_a), u[f"fp8.{name}"])
        assert within_ulp(own.arithmetic.linear(u["x"], w1), u[f"fp4.{name}"])


def test_hyper_connections(unit, model):
    u = unit("hyper_connections")
    pre, post, comb = split_mixes(u["mixes"].float(), u["scale"].float(), u["base"].float(), model.config)
    for found, name in ((pre, "pre"), (post, "post"), (comb, "comb")):
        assert torch.allclose(found, u[name], atol=1e-5, rtol=0), name
    stream = u["stream"][0]
    for found, name in zip(model.layers[0].hc_attn(stream), ("pre", "post", "comb"), strict=True):
        assert torch.allclose(found, u[f"layer0.{name}"][0], atol=1e-5, rtol=0), name
    assert within_ulp(collapse(stream, u["pre_mix"][0].float()), u["hc_pre"][0])
    own = expand(u["sublayer_out"][0], stream, u["layer0.post"][0], u["layer0.comb"][0])
    assert within_ulp(own, u["hc_post"][0])


def test_sparse_attention(unit):
    u = unit("sparse_attention")
    for row in range(2):
        idx, kv = u["topk_idxs"][row].long(), u["kv"][row]
        visible = torch.zeros(len(idx), len(kv) + 1, dtype=torch.bool)
        visible.scatter_(1, idx.where(idx >= 0, len(kv)), True)
        visible = visible[:, :-1]
        assert visible.sum() == (idx >= 0).sum()  # no index twice: a mask says the same
        q, sink, scale = u["q"][row], u["attn_sink"].float(), float(u["softmax_scale"])
        assert within_ulp(attend(q, kv, visible, sink, scale), u["out"][row])
        assert torch.allclose(attend(q.float(), kv, visible, sink, scale), u["out_fp32"][row], atol=1e-5, rtol=0)
    assert not (u["topk_idxs"] >= 0).any(-1).all()  # the row without any valid index is among them


@pytest.mark.parametrize("kind", ["text", "mixed"])
def test_gate(unit, model, kind):
    u = unit("gate")
    ffn, taps = model.layers[0].ffn, {}
    assert torch.allclose(ffn.scores(u["x"]), u["scores"], atol=1e-5, rtol=1e-5)
    image = u["image_mask"] if kind == "mixed" else torch.zeros(33, dtype=torch.bool)
    step = Step(torch.arange(33), State(), lambda name, value: taps.__setitem__(name, value), image)
    ffn(u["x"], step)
    assert torch.equal(taps["layers.0.ffn.gate_indices"], u[f"{kind}.indices"].long())
    assert torch.allclose(taps["layers.0.ffn.gate_weights"], u[f"{kind}.weights"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["", ".exact-weights"])
def test_experts(unit, model, exact, variant):
    u = unit("experts")
    ffn = (exact if variant else model).layers[0].ffn
    assert within_ulp(ffn.expert("experts.1", u["x"]), u[f"out{variant}"])
    weighted = ffn.expert("experts.1", u["x"], u["routing_weight"].float())
    assert within_ulp(weighted, u[f"out_weighted{variant}"])
    assert within_ulp(ffn.expert("shared_experts", u["x"]), u[f"shared.out{variant}"])
    assert (u["gate_preclamp"] > 10).any()
    assert (u["up_preclamp"].abs() > 10).any()


@pytest.mark.parametrize("image", [False, True])
def test_moe(unit, model, image):
    u = unit("experts")
    step = Step(torch.arange(16), State(), ignore, torch.full((16,), image))
    assert within_ulp(model.layers[0].ffn(u["x"], step), u["moe.out_all_image" if image else "moe.out"])


@pytest.mark.parametrize("ratio", [1, 2])
def test_compressor(unit, model, ratio):
    u = unit("compressor")
    attn, x = model.layers[int(u[f"ratio{ratio}.layer"])].attn, u[f"ratio{ratio}.x"][0]
    whole = len(x) // ratio * ratio
    assert within_ulp(attn.compressor(x[:whole]), u[f"ratio{ratio}.chunk"])
    if ratio == 2:
        assert torch.allclose(x[whole:].float() @ attn.compressor.wkv.weight.T, u["ratio2.tail_kv"], atol=1e-5)
        assert torch.allclose(x[whole:].float() @ attn.compressor.wgate.weight.T, u["ratio2.tail_score"], atol=1e-4)


def test_rope(unit, model):
    u, config = unit("rope"), model.config
    released = Rope(64, 160000.0, 16.0, 32, 1, 65536)
    tables = {
        "window": (config.window_rope, u["positions"]),
        "yarn": (config.compressed_rope, u["positions"]),
        "released.window": (Rope(64, 10000.0), u["released.positions"]),
        "released.yarn": (released, u["released.positions"]),
    }
    for name, (rope, positions) in tables.items():
        angle = positions.float()[:, None] * rope_frequencies(rope)
        assert torch.allclose(angle.cos(), u[f"{name}.cos"], atol=1e-5, rtol=0), name
        assert torch.allclose(angle.sin(), u[f"{name}.sin"], atol=1e-5, rtol=0), name
    x = u["x"][0]
    turned = rotate(x, u["positions"], config.compressed_rope)
    assert within_ulp(turned, u["x_rotated_yarn"][0])
    back = rotate(u["x_rotated_yarn"][0], u["positions"], config.compressed_rope, inverse=True)
    assert within_ulp(back, u["x_rotated_back"][0])


def test_engram_constants(unit, official):
    u, directory = unit("engram"), official("a")
    config = Config.load(directory)
    token_map = engram_functions.token_map(Tokenizer.from_file(str(directory / "tokenizer.json")))
    assert torch.equal(token_map, u["token_map"])
    assert int(token_map[config.engram_pad_token_id]) == int(u["pad_id"])
    for i, constants in enumerate(engram_functions.hash_constants(config).values()):
        assert torch.equal(constants.multipliers, u["multipliers"][i])
        assert torch.equal(constants.primes, u["primes"][i])
        assert torch.equal(constants.offsets, u["offsets"][i])


@pytest.mark.parametrize("masked", [False, True])
def test_engram_hash_and_output(unit, model, exact, masked):
    u, config = unit("engram"), model.config
    dead = ~u["token_mask"] if masked else torch.zeros(48, dtype=torch.bool)
    if masked and not dead.any():
        dead = u["token_mask"]
    ids = torch.where(dead, engram_functions.DEAD, u["token_map"][u["input_ids"]])
    kind = "masked" if masked else "text"
    for i, layer in enumerate(config.engram_layer_ids):
        rows = engram_functions.hash_rows(ids, model.layers[layer].engram.constants, int(u["pad_id"]))
        assert torch.equal(rows[~dead], u[f"hash.{kind}"][:, i][~dead])
        wanted = u[f"rows_layer{layer}"]
        first = u["hash.text"][: len(wanted), i]
        found = model.checkpoint.table_rows(f"layers.{layer}.engram.embed", first.flatten()).view(len(wanted), 12, -1)
        assert torch.equal(found.bfloat16(), wanted)
    first_layer = config.engram_layer_ids[0]
    rows = engram_functions.hash_rows(ids, model.layers[first_layer].engram.constants, int(u["pad_id"]))
    rows = rows.where(~dead[:, None], 0)
    out = model.layers[first_layer].engram.inject(u["stream"], rows, dead)
    assert within_ulp(out, u["engram_out.masked" if masked else "engram_out"])
    if not masked:
        out = exact.layers[first_layer].engram.inject(u["stream"], rows, dead)
        assert within_ulp(out, u["engram_out.exact-weights"])


def test_released_engram_constants():
    """Facts of the released model (spec section 3.9)."""
    fields = Config.__dataclass_fields__
    config = Config(
        **{name: 0 for name in fields if name not in ("engram_layer_ids",)}
        | {  # type: ignore[arg-type]
            "engram_layer_ids": (1, 14),
            "engram_max_ngram_size": 4,
            "engram_vocab_size": 16_000_000,
            "engram_n_heads": 8,
            "engram_compressed_vocab_size": 99092,
        }
    )
    constants = engram_functions.hash_constants(config)
    assert int(constants[1].primes.sum()) == 384_006_168
    assert int(constants[14].primes.sum()) == 384_016_682
    assert constants[1].multipliers.tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert constants[14].multipliers.tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_candidates(unit):
    u = unit("candidates")
    block, topk = int(u["block_size"]), int(u["topk_blocks"])
    rows = torch.arange(u["scores"].shape[1])
    found = candidate_mask(u["scores"], u["visible"], block, topk)
    visible = rows < u["visible"][:, None]  # the official mask covers whole blocks
    assert torch.equal(found, u["mask"] & visible)
    last = candidate_mask(u["scores"][-1:], u["visible"][-1:], block, topk)
    assert torch.equal(last, u["mask_decode"] & visible[-1:])


def test_rms_norm(unit, model):
    u = unit("rmsnorm")
    assert within_ulp(rms_norm(u["x"], u["weight"].float(), model.config.rms_norm_eps), u["out"])
