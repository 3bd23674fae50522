"""Counting requests, tokens and time while they pass."""
