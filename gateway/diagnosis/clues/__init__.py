"""Clues in single parts of a failure: its figures, its folders, and the parts that it names."""
