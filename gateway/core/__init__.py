"""Decisions only: same input, same output; no I/O, clock, randomness or logging. `tests/unit/core/test_core_is_pure.py` enforces it."""
