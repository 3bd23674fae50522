"""Where engines run: one contract (`host`), three bodies: `docker`, `agent`, `process`."""
