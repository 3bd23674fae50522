"""Engines in containers."""
