"""Which backend the attention layers get."""
