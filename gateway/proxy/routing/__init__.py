"""Which replica a request goes to, and who waits."""
