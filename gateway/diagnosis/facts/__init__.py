"""Learned facts, and their scopes."""
