"""Verified tokens are distributed as the target's own: exactly the property a user cannot see broken."""

from __future__ import annotations

import pytest
import torch

from vllm_ascend_dsv41.spec_decode import verification
from vllm_ascend_dsv41.spec_decode.verification import Drafted, block_length, draw, standard_length, verify

VOCABULARY, COLUMNS, SAMPLES = 5, 3, 200_000


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20_261_130)


def models(seed=0):
    """A target and a draft over ``VOCABULARY`` tokens that depend on the token before: logits [V, V] each."""
    source = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCABULARY, VOCABULARY, generator=source) * 1.5
    return target, target + torch.randn(VOCABULARY, VOCABULARY, generator=source)


def sampled(block, probabilistic, choose=verify, samples=SAMPLES):
    """Texts of COLUMNS + 1 tokens behind token 0, each from one verified draft, continued by the target alone."""
    target, draft = models()
    p, q = target.softmax(1), draft.softmax(1)
    previous = torch.zeros(samples, dtype=torch.long)
    tokens, rows, distributions = [], [], []
    for _ in range(COLUMNS):
        distribution = q[previous]
        rows.append(target[previous])
        previous = draw(distribution, {}) if probabilistic else draft[previous].argmax(1)
        tokens.append(previous)
        distributions.append(distribution)
    drafted = Drafted.of(
        [COLUMNS] * samples,
        torch.stack(tokens, 1).flatten(),
        torch.stack(distributions, 1).flatten(0, 1) if probabilistic else None,
    )
    logits = torch.stack(rows, 1).flatten(0, 1)
    bonus = draw(p[previous], {})
    uniform = torch.rand(samples, COLUMNS, dtype=torch.float64)
    greedy = torch.zeros(samples, dtype=torch.bool)
    text = choose(drafted, logits, bonus, uniform, greedy, {}, block).long()
    lengths = (text >= 0).sum(1)
    for column in range(1, COLUMNS + 1):  # what was rejected, the target writes
        text[:, column] = torch.where(column < lengths, text[:, column], draw(p[text[:, column - 1]], {}))
    return text, lengths


def chi_square(text):
    """Against the target's distribution of whole texts, in standard deviations above the expectation."""
    p = models()[0].softmax(1)
    expected = p[0]  # [V], then [V, V], ...: the last dimension is the newest token
    for _ in range(COLUMNS):
        expected = expected[..., None] * p
    expected = expected.flatten()
    code = torch.zeros(len(text), dtype=torch.long)
    for column in range(COLUMNS + 1):
        code = code * VOCABULARY + text[:, column]
    found = torch.bincount(code, minlength=VOCABULARY ** (COLUMNS + 1)).double()
    wanted = expected.double() * len(text)
    often = wanted >= 5
    statistic = ((found - wanted)[often] ** 2 / wanted[often]).sum()
    freedom = int(often.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("probabilistic", [True, False])
@pytest.mark.parametrize("block", [True, False])
def test_the_distribution_is_the_targets(block, probabilistic):
    text, lengths = sampled(block, probabilistic)
    assert set(lengths.tolist()) == {1, 2, 3, 4}
    assert chi_square(text) < 4


def test_block_verification_accepts_more():
    one_at_a_time, block = (float(sampled(kind, True)[1].double().mean()) for kind in (False, True))
    assert block > one_at_a_time + 0.01


BIASES = {
    "accepts too easily": ("standard_length", lambda d, t, u: standard_length(d, t, u * 0.9)),
    "accepts too rarely": ("standard_length", lambda d, t, u: standard_length(d, t, (u * 1.1).clamp_max(1))),
    "draws from the target, not the residual": (
        "_residual",
        lambda d, t, c, f: t[d.rows.gather(1, c[:, None])[:, 0]],
    ),
}


@pytest.mark.parametrize("bias", BIASES)
def test_a_biased_sampler_is_noticed(monkeypatch, bias):
    """The test above can fail."""
    monkeypatch.setattr(verification, *BIASES[bias])
    assert chi_square(sampled(False, True)[0]) > 10


def test_a_biased_block_is_noticed(monkeypatch):
    monkeypatch.setattr(verification, "block_length", lambda d, t, u: block_length(d, t, u * 0.9))
    assert chi_square(sampled(True, True)[0]) > 10


@pytest.mark.parametrize("block", [True, False])
def test_drafts_of_any_length(block):
    """Rows of a batch do not touch each other: requests with fewer tokens, or none, beside others."""
    source = torch.Generator().manual_seed(3)
    counts = [2, 0, 5, 1, 3]
    n, requests = sum(counts), len(counts)
    tokens = torch.randint(0, VOCABULARY, (n,), generator=source)
    probabilities = torch.rand(n, VOCABULARY, generator=source).softmax(1)
    logits = torch.randn(n, VOCABULARY, generator=source) * 3
    bonus = torch.arange(requests)
    uniform = torch.rand(requests, 5, generator=source, dtype=torch.float64)
    greedy = torch.tensor([False, False, False, True, False])

    def generators(rows):
        return {place: torch.Generator().manual_seed(row) for place, row in enumerate(rows)}

    drafted = Drafted.of(counts, tokens, probabilities)
    together = verify(drafted, logits, bonus, uniform, greedy, generators(range(requests)), block)
    assert together[1].tolist() == [1, -1, -1, -1, -1, -1]
    for row in (0, 2, 3, 4):
        part = slice(sum(counts[:row]), sum(counts[: row + 1]))
        alone = Drafted.of([counts[row]], tokens[part], probabilities[part])
        found = verify(
            alone,
            logits[part],
            bonus[row : row + 1],
            uniform[row : row + 1, : counts[row]],
            greedy[row : row + 1],
            generators([row]),
            block,
        )
        assert found[0].tolist() == together[row, : counts[row] + 1].tolist(), row
        assert (together[row, counts[row] + 1 :] == -1).all()


def test_greedy_takes_the_best_token():
    logits = torch.tensor([[0.0, 5, 1], [0, 1, 5], [5, 0, 1], [0, 5, 1]])
    drafted = Drafted.of([2, 2], torch.tensor([1, 2, 0, 2]), None)
    for greedy in (None, torch.tensor([True, True])):
        found = verify(drafted, logits, torch.tensor([7, 8]), torch.zeros(2, 2), greedy, {})
        assert found.tolist() == [[1, 2, 7], [0, 1, -1]]


@pytest.mark.parametrize("rates", [[1.0, 0.5, 0.25], [1.0, 1.0, 0.0]])
def test_synthetic_acceptance(rates):
    """Tokens are accepted at the asked rates, whatever they are; greedy and sampled requests alike."""
    samples = 20_000
    drafted = Drafted.of([3] * samples, torch.randint(0, VOCABULARY, (3 * samples,)), None)
    logits = torch.randn(3 * samples, VOCABULARY)
    greedy = torch.arange(samples) % 2 == 0
    uniform = torch.rand(samples, 3, dtype=torch.float64)
    text = verify(
        drafted, logits, torch.zeros(samples, dtype=torch.long), uniform, greedy, {}, rates=torch.tensor(rates)
    )
    for side in (greedy, ~greedy):
        lengths = (text[side] >= 0).sum(1) - 1
        expected = torch.tensor(rates).cumprod(0)
        found = torch.stack([(lengths > i).double().mean() for i in range(3)])
        assert torch.allclose(found, expected.double(), atol=0.02)


def test_equal_distributions_always_accept():
    """Also where rounding leaves no residual."""
    p = torch.rand(100, VOCABULARY).log_softmax(1)
    tokens = draw(p.softmax(1), {})
    drafted = Drafted.of([1] * 100, tokens, p.softmax(1))
    uniform = torch.full((100, 1), 1 - 2**-53, dtype=torch.float64)
    text = verify(drafted, p, torch.full((100,), 9), uniform, torch.zeros(100, dtype=torch.bool), {})
    assert (text[:, 1] == 9).float().mean() > 0.9
    assert ((text >= -1) & (text <= 9)).all()


def test_seeds_repeat():
    weights = torch.rand(4, 50)
    first = draw(weights, {1: torch.Generator().manual_seed(5), 3: torch.Generator().manual_seed(6)})
    again = draw(weights, {1: torch.Generator().manual_seed(5), 3: torch.Generator().manual_seed(6)})
    assert first[[1, 3]].tolist() == again[[1, 3]].tolist()
