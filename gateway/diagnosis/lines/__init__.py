"""The lines of a log: out of its bytes, without what carries them, and what forms of them mean."""
