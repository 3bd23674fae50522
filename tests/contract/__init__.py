"""One suite for every host; `harness.py` says what a host brings to it."""
