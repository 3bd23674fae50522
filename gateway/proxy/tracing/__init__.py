"""Spans of requests in the data plane, without any library of OpenTelemetry."""
