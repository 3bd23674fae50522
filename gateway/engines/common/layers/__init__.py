"""Layers of a model as an engine version builds them, and their weights."""
