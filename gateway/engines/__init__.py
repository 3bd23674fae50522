"""Engine kinds: common parts, vLLM, SGLang, and the inquiry that questions an engine's own code."""
