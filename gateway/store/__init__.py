"""Persistent data: models, attempts, facts, events and logs."""
