"""What stops a run before it begins."""


class EvalError(ValueError):
    """One thing that is not as it must be, where, and what to do."""
