"""Engines as processes of this machine."""
