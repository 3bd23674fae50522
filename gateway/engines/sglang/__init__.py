"""SGLang: its engine contract, attention, memory and KV cache."""
