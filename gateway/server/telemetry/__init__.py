"""Traces and metrics for a collector of OpenTelemetry."""
