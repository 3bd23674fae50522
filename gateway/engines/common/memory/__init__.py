"""How large KV caches and the rest of an engine's memory are."""
