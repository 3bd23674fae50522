"""Ollama's API, as a translation to and from the requests of /v1."""
