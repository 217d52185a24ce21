"""DeepSeek-V4.1 in plain PyTorch: the oracle of the tests and of checkpoint comparison.

Nothing here imports vLLM, ``ops`` or ``model``: an error must not be able to hide on both sides.
"""

from .checkpoint import Checkpoint, CheckpointError
from .config import Config
from .model import Model, State
from .numerics import Grid

__all__ = ["Checkpoint", "CheckpointError", "Config", "Grid", "Model", "State"]
