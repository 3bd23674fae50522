"""Observation of engines: their logs, their answers, and the proofs in both."""
