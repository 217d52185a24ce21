"""Offline conversion of checkpoints, and the description of their contents."""

from .checkpoint import Checkpoint, CheckpointError, Layout, identify, open_checkpoint, read_config
from .convert import convert
from .inventory import Kind, TensorSpec, Weights, inventory

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Kind",
    "Layout",
    "TensorSpec",
    "Weights",
    "convert",
    "identify",
    "inventory",
    "open_checkpoint",
    "read_config",
]
