"""A load on a served model, and what it shows: how fast first tokens come, one answer, and many at
once."""
