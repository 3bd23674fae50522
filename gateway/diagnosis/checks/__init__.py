"""The checks in an engine's own source: places that raise, their conditions, and their cure."""
