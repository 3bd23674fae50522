"""Counts of requests, tokens and time in the data plane."""
