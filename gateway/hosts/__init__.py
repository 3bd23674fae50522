"""Hosts that run engines: one contract (`host`), three implementations: `docker`, `agent`,
`process`."""
