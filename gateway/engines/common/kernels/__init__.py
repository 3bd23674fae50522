"""Kernels of linear layers and of experts."""
