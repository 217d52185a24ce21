"""The vLLM model: written once, for every device."""
