"""Measurements of the free GPUs, and the facts from them."""
