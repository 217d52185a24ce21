"""``dsv41 plan``: the memory of a launch before anything is started."""

from .memory import MemoryPlan, Part, plan
from .report import chart, text

__all__ = ["MemoryPlan", "Part", "chart", "plan", "text"]
