"""Profiles: what is known of engines, failures and machines, read from YAML and JSON."""
