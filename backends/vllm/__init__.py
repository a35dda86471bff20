"""Engines: vLLM in processes of its own."""
