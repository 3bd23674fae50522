"""Measurements of served models, and better plans from them."""
