"""Measurements of the network between two machines of a cluster."""
