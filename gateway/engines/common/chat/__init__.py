"""Chat templates, parsers of answers, and the abilities of a served model."""
