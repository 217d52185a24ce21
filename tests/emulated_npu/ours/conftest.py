import pytest


@pytest.fixture(autouse=True)
def fast_kernels(monkeypatch):
    """Whole engines take our Triton kernels' results from their operators' references, unless a test says otherwise."""
    monkeypatch.setenv("EMULATED_TRITON", "vectorised")
