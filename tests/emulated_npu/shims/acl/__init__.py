"""pyACL, which CANN ships: only its import works. vllm-ascend uses it for sleep mode."""

from . import rt

__all__ = ["rt"]
