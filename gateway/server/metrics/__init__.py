"""Gauges of models, engines, GPUs and the process."""
