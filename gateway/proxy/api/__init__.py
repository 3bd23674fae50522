"""The OpenAI API: its endpoints, and reading of requests."""
