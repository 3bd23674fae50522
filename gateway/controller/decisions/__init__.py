"""Decisions of the controller, pure: what to do next with each replica and model."""
