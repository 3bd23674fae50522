"""Structures of architectures, learned from the engine's own model classes."""
