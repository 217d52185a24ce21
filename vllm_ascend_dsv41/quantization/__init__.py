"""The ``ascend`` quantisation method of vLLM: W8A8_DYNAMIC and FLOAT, by the labels of the checkpoint."""

from .config import AscendConfig

__all__ = ["AscendConfig"]
