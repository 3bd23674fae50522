"""Runs inside vLLM's image or environment."""
