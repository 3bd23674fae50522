"""Profiles: the knowledge of engines, failures and machines, read from YAML and JSON."""
