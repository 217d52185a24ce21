"""Is a checkpoint directory complete, consistent, and what its source says?

Numbers are decoded by the reference's codecs, not by the converter's: a mistake must not hide on both sides. What is
shared are names and shapes, and the rule which tensors a rotation turns how.
"""

from .report import Finding, Report
from .run import verify

__all__ = ["Finding", "Report", "verify"]
