"""Entry point `triton.backends`: vLLM uses Triton only when one driver is active. Kernels run in the interpreter."""
