"""Engines on several machines: node service, relay, link, supervisor, and the host over them."""
