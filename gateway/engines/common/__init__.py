"""What kinds of engines do alike and differently with a variant of a model: one object for each
kind."""
