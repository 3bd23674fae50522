"""What happened: told once, kept, and handed to whoever listens."""
