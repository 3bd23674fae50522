"""Engines in this process: the twin of the real hosts that scripts faults."""
