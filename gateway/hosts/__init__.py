"""Where engines run: one contract (`host`), three bodies (`docker`, `process`, `memory`)."""
