"""What is counted and logged of requests."""
