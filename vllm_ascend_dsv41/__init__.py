"""vLLM plugin that serves DeepSeek-V4.1-Flash. Importing this module imports nothing heavy."""

from __future__ import annotations


def platform_plugin() -> str | None:
    """Entry point ``vllm.platform_plugins``: the class that should rule, or None to stand aside."""
    from .platform import select

    return select()


def register() -> None:
    """Entry point ``vllm.general_plugins``: called in every process of a server, maybe repeatedly."""
    from .platform.register import register_all

    register_all()
