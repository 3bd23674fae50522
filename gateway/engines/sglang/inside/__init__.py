"""Runs inside SGLang's image or environment."""
