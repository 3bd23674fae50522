"""Measurements of served models and of GPUs."""
