"""Hashes of the served model: DeepSeek's own on golden data, and the same however a prompt is split."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from vllm_ascend_dsv41.engram import EngramTables, NgramHash, Place
from vllm_ascend_dsv41.engram.hashing import EngramConfigError
from vllm_ascend_dsv41.engram.options import EngramOptions
from vllm_ascend_dsv41.ops import DEAD, Batch
from vllm_ascend_dsv41.quant import open_checkpoint

IMAGE = 11  # a token of the tiny vocabulary that stands for an image here


class FastTokenizer:
    """What NgramHash reads of a tokenizer."""

    def __init__(self, path):
        self.backend_tokenizer = Tokenizer.from_file(str(path))

    def __len__(self):
        return self.backend_tokenizer.get_vocab_size()


@pytest.fixture(scope="module")
def ngram_hash(official):
    directory = official("a")
    text = json.loads((directory / "config.json").read_text())["text_config"]
    return NgramHash({**text, "image_token_id": IMAGE}, FastTokenizer(directory / "tokenizer.json"))


def whole(ngram_hash, ids):
    """Rows of a request that is computed at once."""
    lookback = torch.full((1, ngram_hash.lookback), -1, dtype=torch.int32)
    return ngram_hash(ids, batch_of([len(ids)]), lookback)


def batch_of(sizes):
    """Requests of a step; how long they are does not matter to hashes."""
    sizes = torch.tensor(sizes, dtype=torch.int32)
    start = torch.cat([sizes.new_zeros(1), sizes.cumsum(0).int()])
    return Batch(start, sizes, int(sizes.sum()))


def before(ids, position, depth):
    """Ids before a position, newest first, -1 where there is none: what the runner supplies."""
    found = [int(ids[position - back]) if position >= back else -1 for back in range(1, depth + 1)]
    return torch.tensor(found, dtype=torch.int32)


def test_golden_hashes_and_rows(ngram_hash, golden, converted):
    """DeepSeek's hashes of text, and the rows that they name, out of a converted table."""
    unit = golden("a", "unit_engram")
    rows = whole(ngram_hash, unit["input_ids"])
    plain = unit["input_ids"] != IMAGE
    history = torch.stack([plain.roll(back) | (torch.arange(len(plain)) < back) for back in range(4)]).all(0)
    assert history.any()
    assert torch.equal(rows.transpose(0, 1)[history], unit["hash.text"][history])
    checkpoint = open_checkpoint(converted("a", "bf16"))
    layers = [layer for layer in checkpoint.plan.trunk if layer.engram is not None]
    plan = [(layer.index, ngram_hash.primes[layer.engram]) for layer in layers]
    dim = checkpoint.config["text_config"]["engram_head_dim"]
    tables = EngramTables(checkpoint, plan, dim, EngramOptions(chunk_mib=2), Place(torch.device("cpu")))
    tables.load()
    for number, layer in enumerate(layers):
        wanted = unit[f"rows_layer{layer.index}"]
        first = unit["hash.text"][: len(wanted), number]
        assert torch.equal(tables[number].lookup(first, torch.bfloat16), wanted)
    tables.close()


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_split_into_steps_gives_the_same_hashes(ngram_hash, data):
    """Several requests with images, each split anywhere, steps mixing whatever parts come next."""
    token = st.one_of(st.integers(0, 370), st.just(IMAGE))
    requests = [
        torch.tensor(ids)
        for ids in data.draw(st.lists(st.lists(token, min_size=1, max_size=25), min_size=1, max_size=4))
    ]
    wanted = [whole(ngram_hash, ids) for ids in requests]
    done = [0] * len(requests)
    found = [torch.full_like(rows, -7) for rows in wanted]
    while any(at < len(ids) for at, ids in zip(done, requests, strict=True)):
        step = [
            (number, done[number], min(len(ids), done[number] + 9 - data.draw(st.integers(0, 9))))
            for number, ids in enumerate(requests)
        ]
        step = [part for part in step if part[1] < part[2]]
        if not step:
            continue
        ids = torch.cat([requests[number][begin:end] for number, begin, end in step])
        sizes = torch.tensor([end - begin for _, begin, end in step])
        lookback = torch.stack([before(requests[number], begin, ngram_hash.lookback) for number, begin, _ in step])
        rows = ngram_hash(ids, batch_of(sizes.tolist()), lookback)
        for (number, begin, end), part in zip(step, rows.split(sizes.tolist(), dim=1), strict=True):
            found[number][:, begin:end] = part
            done[number] = end
    for rows, all_at_once in zip(found, wanted, strict=True):
        assert torch.equal(rows, all_at_once)


def test_an_image_hides_itself_and_what_lies_before(ngram_hash):
    ids = torch.tensor([20, 30, IMAGE, 40, 50, 60, 70])
    rows = whole(ngram_hash, ids)
    behind = whole(ngram_hash, torch.cat([torch.tensor([99, 98, IMAGE]), ids[3:]]))
    assert torch.equal(rows[:, 3:], behind[:, 3:])
    assert not torch.equal(rows[:, 6], whole(ngram_hash, ids[4:])[:, 2])  # three tokens back is a token, not nothing
    assert int(ngram_hash.token_map[IMAGE]) == DEAD


@pytest.mark.parametrize("field", ["engram_compressed_vocab_size", "engram_num_embeddings"])
def test_a_config_of_another_checkpoint_is_refused(official, field):
    directory = official("a")
    text = json.loads((directory / "config.json").read_text())["text_config"]
    text[field] = 5 if field.endswith("size") else [5, 6]
    with pytest.raises(EngramConfigError, match=field):
        NgramHash(text, FastTokenizer(directory / "tokenizer.json"))
