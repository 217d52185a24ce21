"""What a worker says once the model is loaded."""

from __future__ import annotations

from ..ops import report
from ..upstream import init_logger

logger = init_logger("vllm.dsv41")


def log_operators(device_type: str) -> None:
    """One line: which implementation serves each operator."""
    served = ", ".join(f"{name}={implementation}" for name, implementation in report(device_type).items())
    logger.info("operators: %s", served)
