"""Every implementation against its reference, the registry, and what comparisons do not show."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_dsv41 import ops
from vllm_ascend_dsv41.ops import registry
from vllm_ascend_dsv41.ops.compare import compare
from vllm_ascend_dsv41.ops.examples import examples


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_implementations_agree_with_the_reference(seed):
    results = list(compare(seed))
    failed = [result for result in results if not result.passed]
    assert not failed
    assert sum(result.implementation == "cpu" for result in results) >= 40


def test_every_operator_has_examples():
    assert {example.operator for example in examples()} == {op.name for op in ops.operators()}


def test_a_wrong_implementation_is_found(monkeypatch):
    wrong = ops.hc_expand.implementations["cpu"]
    monkeypatch.setitem(
        ops.hc_expand.implementations, "cpu", lambda y, x, post, comb: wrong(y, x, post, comb.transpose(1, 2))
    )
    assert any(result.operator == "hc_expand" and not result.passed for result in compare())


def test_not_a_number_is_not_within_a_bound(monkeypatch):
    monkeypatch.setitem(ops.swiglu.implementations, "cpu", lambda x, *_: torch.full_like(x[:, ::2], torch.nan))
    assert any(result.operator == "swiglu" and not result.passed for result in compare())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("rms_norm", "not of the form operator=implementation"),
        ("no_such=cpu", "no operator 'no_such'"),
        ("rms_norm=npu", "rms_norm has no implementation 'npu'; it has cpu, reference"),
    ],
)
def test_bad_overrides_are_refused(monkeypatch, value, message):
    monkeypatch.setenv(registry.OVERRIDES, value)
    with pytest.raises(ops.OperatorError, match=message):
        ops.report("cpu")


def test_override_selects_an_implementation(monkeypatch):
    monkeypatch.setenv(registry.OVERRIDES, "rms_norm=reference, hc_expand=cpu")
    report = ops.report("cpu")
    assert report["rms_norm"] == "reference"
    assert report["hc_expand"] == "cpu"


def test_an_operator_is_declared_once():
    def rms_norm() -> None:
        """A second operator of that name."""

    with pytest.raises(ops.OperatorError, match="declared twice"):
        ops.registry.operator(rms_norm)


def test_rows_of_other_requests_are_never_read():
    """Blocks are handed on uncleared: a NaN in a row outside the request must not show."""
    for example in examples(dtype=torch.float32):
        if example.operator in ("sparse_attention", "select_rows"):
            for function in getattr(ops, example.operator).implementations.values():
                result = function(*example.args, **example.kwargs)
                tensors = [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]
                assert all(torch.isfinite(t.float()).all() for t in tensors), example.title


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_empty_batches(implementation):
    """Data-parallel ranks without work call the model with no tokens."""
    function = ops.sparse_attention.implementations[implementation]
    table = torch.zeros(1, 2, dtype=torch.int32)
    batch = ops.Batch(torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0)
    out = function(torch.zeros(0, 2, 8), batch, torch.zeros(2, 4, 8), table, 4, torch.zeros(2), 1.0)
    assert out.shape == (0, 2, 8)
    gather = ops.gather_rows.implementations[implementation]
    assert gather(torch.zeros(2, 4, 8), torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3, 8)


def one_token(length):
    """A request whose newest token is computed."""
    return ops.Batch(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32), 1)


def test_candidates_hold_for_later_layers_as_for_their_source():
    """A consumer that sees few rows selects all of them, whatever the candidates say."""
    keys = torch.randn(4, 8, 16)
    table = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    q, weights = torch.randn(1, 2, 16), torch.ones(1, 2)
    arguments = (q, weights, keys, None, one_token(20), table)
    _, published = ops.select_rows(*arguments, 6, 1, 4, 3)
    selected, _ = ops.select_rows(*arguments, 6, 1, 4, 0, published)
    assert set((selected // 4).flatten().tolist()) <= set(published.flatten().tolist())
    assert 4 in published.flatten().tolist()  # the newest block is always among them


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_candidates_fewer_than_selected(implementation):
    """Two candidate blocks of four rows and a top-k of sixteen: the candidates decide even among few rows."""
    function = ops.select_rows.implementations[implementation]
    keys, table = torch.randn(4, 8, 16), torch.tensor([[1, 2, 3]], dtype=torch.int32)
    arguments = (torch.randn(1, 2, 16), torch.ones(1, 2), keys, None, one_token(15), table)
    candidates = torch.tensor([[0, 3]], dtype=torch.int32)
    selected, _ = function(*arguments, 16, 1, 4, 0, candidates)
    assert selected[selected >= 0].tolist() == [0, 1, 2, 3, 12, 13, 14]


def test_int8_products_are_exact_for_long_sums():
    """The CPU implementation sums in float32: exact for the widths of the released model."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (8, 5120), generator=generator, dtype=torch.int8)
    weight = torch.randint(-127, 128, (16, 5120), generator=generator, dtype=torch.int8)
    one = torch.ones(8, 1), torch.ones(16, 1)
    found = ops.w8a8_matmul(codes, one[0], weight, one[1], torch.float32)
    assert torch.equal(found.long(), codes.long() @ weight.long().T)
