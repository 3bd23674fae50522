"""One suite for every host; `harness.py` has the parts that a host brings."""
