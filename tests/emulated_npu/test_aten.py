"""PyTorch's own operators on the device: the CPU's results, on device memory, with the device's refusals."""

import threading

import pytest
import torch
import torch.nn.functional as F

pytestmark = [pytest.mark.long, pytest.mark.emulated_npu]


def tensors(device):
    g = torch.Generator().manual_seed(1)
    random = lambda *sizes: torch.randn(*sizes, generator=g)  # noqa: E731
    made = {
        "embedding": random(100, 64).bfloat16(),
        "gain": random(64).bfloat16(),
        "weight": random(64, 96).bfloat16() * 0.1,
    }
    return {k: v.to(device) for k, v in made.items()}


def a_small_model(device):
    """Views with offsets, in-place writes through views, gathers and scatters, sorts, reductions, out=."""
    p = tensors(device)
    ids = torch.arange(12).to(device) * 7 % 100
    x = F.embedding(ids, p["embedding"])
    z = F.layer_norm(x.float(), (64,)).to(x.dtype) * p["gain"] @ p["weight"]
    q, k = z.view(12, 2, 48).transpose(0, 1).split(24, dim=-1)
    a = torch.softmax((q @ k.transpose(1, 2)).float() * 0.1, -1).bfloat16()
    o = torch.cat([(a @ k).transpose(0, 1).reshape(12, 48), z[:, 48:]], 1)
    values, indices = o.float().topk(5, -1)
    slots = torch.arange(12, device=device) + 3
    cache = torch.zeros(20, 96, dtype=torch.bfloat16, device=device)
    cache[slots] = o
    cache.scatter_(1, torch.full((20, 1), 5, device=device), torch.ones(20, 1, dtype=torch.bfloat16, device=device))
    cache[2:5].mul_(2)
    cache[:, ::2].add_(1)
    b = cache.clone()
    torch.index_select(b, 0, slots, out=cache[:12])
    m = torch.where(cache > 0, cache, torch.zeros((), dtype=torch.bfloat16, device=device))
    return {
        "x": x,
        "z": z,
        "a": a,
        "o": o,
        "values": values,
        "indices": indices,
        "cache": cache,
        "m": m,
        "row": m[indices[:, 0] % 20],
        "sorted": torch.sort(values.flatten())[0],
        "nonzero": torch.nonzero(m[0] > 0),
        "cumsum": m.float().cumsum(0),
        "max": m.max(dim=1)[0],
        "argmax": o.argmax(-1),
        "einsum": torch.einsum("hqd,hkd->hqk", q.float(), k.float()),
        "masked": o[o > 0],
        "unique": torch.unique(ids % 5),
        "bincount": torch.bincount(ids % 5),
        "isin": torch.isin(ids, slots),
        "repeat": torch.repeat_interleave(slots, 2),
        "silu": F.silu(o) * torch.sigmoid(o),
        "tril": torch.ones(4, 4, device=device).tril(),
        "linspace": torch.linspace(0, 1, 7, device=device),
        "sdpa": F.scaled_dot_product_attention(q[None].float(), k[None].float(), k[None].float(), is_causal=True),
        "conv": F.conv2d(torch.ones(1, 1, 4, 4, device=device), torch.ones(1, 1, 3, 3, device=device)),
    }


@torch.inference_mode()
def test_the_same_bits_as_the_cpu():
    wanted, found = a_small_model("cpu"), a_small_model("npu")
    for name in wanted:
        assert found[name].device.type == "npu", name
        assert torch.equal(found[name].cpu(), wanted[name]), name


def test_views_share_memory():
    x = torch.zeros(4, 4, device="npu")
    x.t()[1:, ::2].fill_(3)
    assert x.sum().item() == 18
    assert x[0, 1].item() == 3
    y = torch.arange(4.0, device="npu")
    torch.cumsum(y, 0, out=y)
    assert y.tolist() == [0, 1, 3, 6]
    out = torch.empty(0, device="npu")
    torch.add(torch.ones(3, device="npu"), 1, out=out)
    assert out.tolist() == [2, 2, 2]


def test_random_numbers_follow_the_seed():
    torch.npu.manual_seed(3)
    a = torch.randn(4, device="npu")
    torch.npu.manual_seed(3)
    b, c = torch.randn(4, device="npu"), torch.randn(4, device="npu")
    assert torch.equal(a, b)
    assert not torch.equal(b, c)
    g = torch.Generator(device="npu")
    g.manual_seed(5)
    first = torch.empty(4, device="npu").exponential_(generator=g)
    second = torch.empty(4, device="npu").exponential_(generator=g)
    g.manual_seed(5)
    assert torch.equal(first, torch.empty(4, device="npu").exponential_(generator=g))
    assert not torch.equal(first, second)


def test_all_threads_are_served():
    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append((torch.full((3,), float(i), device="npu") * 2).sum().item()))
        for i in range(4)
    ]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(results) == [0, 6, 12, 18]


def test_mixing_devices_is_refused():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="npu") + torch.ones(2)
    assert (torch.ones(2, device="npu") * torch.tensor(3.0)).tolist() == [3, 3], "numbers on the host are allowed"
    assert torch.arange(5.0, device="npu")[torch.tensor([1, 2])].tolist() == [1, 2], "indices on the host are allowed"


def test_two_npus_do_not_mix():
    """In the group of one device this needs its own process."""
    import os
    import subprocess
    import sys

    code = "import torch; print((torch.ones(2, device='npu:0') + torch.ones(2, device='npu:1')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "FAKE_NPU_COUNT": "2"}
    )
    assert "npu:0" in done.stderr
    assert "npu:1" in done.stderr
    assert done.returncode == 1


def test_indices_on_the_host_are_for_indexing_only():
    x, index = torch.arange(5.0, device="npu"), torch.tensor([1, 2])
    for refused in (
        lambda: x.index_select(0, index),
        lambda: x.index_add_(0, index, torch.ones(2, device="npu")),
        lambda: x.index_put_((index,), torch.ones(2)),
        lambda: torch.arange(5.0)[index.to("npu")],
    ):
        with pytest.raises(RuntimeError, match="CPU tensor"):
            refused()


def test_threads_may_free_memory():
    """A callback into Python from within the allocator's lock would stop all threads."""

    def work():
        for step in range(30):
            x = torch.full((3 << 20,), 1.0, device="npu")
            assert x[:: 1 << 18].unique().tolist() == [1.0]
            del x
            if step % 3 == 0:
                torch.npu.empty_cache()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not any(t.is_alive() for t in threads)


def test_lazy_conjugation_and_negation():
    x = torch.arange(4.0) + 1j
    y = x.to("npu")
    assert torch.equal((y.conj() * 2).cpu(), x.conj() * 2)
    assert torch.equal(y.conj().cpu(), x.conj())
    assert torch.equal((y.conj().imag + 0).cpu(), x.conj().imag + 0)
    out = torch.zeros(4, dtype=torch.complex64, device="npu")
    out.conj().copy_(y)
    assert torch.equal(out.cpu(), x.conj().resolve_conj())


def test_poison_shows_a_reader_of_unwritten_memory():
    assert torch.isnan(torch.empty(8, device="npu") + 1).all()


def test_complex_and_fp8():
    assert torch.view_as_complex(torch.ones(2, 2, device="npu")).abs().tolist() == pytest.approx([2**0.5] * 2)
    assert torch.ones(4, device="npu").to(torch.float8_e4m3fn).float().tolist() == [1] * 4
