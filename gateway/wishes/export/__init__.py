"""The start of an engine, written for other programs: a command line, Compose, Kubernetes. Pure."""
