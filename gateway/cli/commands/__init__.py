"""The commands that people know from other programs."""
