"""Drafting with DSpark on vLLM's V1 model runners: options, proposer, verification, health."""
