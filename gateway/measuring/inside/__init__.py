"""GPU measurements by an engine's torch or by the driver; ranks.py has the protocol."""
