"""Workers and model runners (vLLM's V1) for each device."""
