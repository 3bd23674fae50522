"""Measures GPUs, by an engine's torch or by the driver alone; ranks.py says what comes in and goes
out."""
