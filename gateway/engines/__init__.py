"""What an engine kind does: common parts, vLLM, SGLang, and the inquiry that asks an engine's own
code."""
