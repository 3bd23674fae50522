"""Programs of the process host that run in the Python of an engine."""
