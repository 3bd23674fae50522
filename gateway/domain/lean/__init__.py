"""Values without pydantic, for commands that start and end quickly."""
