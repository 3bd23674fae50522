"""Hosts that run engines: one contract (`host`), four implementations: `docker`, `agent`,
`process`, `cluster`."""
