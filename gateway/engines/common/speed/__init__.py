"""Expected and measured speed of plans."""
