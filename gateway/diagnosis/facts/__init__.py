"""What was learned, and where it holds."""
