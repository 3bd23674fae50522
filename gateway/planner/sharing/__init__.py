"""How models share GPUs."""
