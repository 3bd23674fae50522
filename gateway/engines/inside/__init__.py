"""Runs inside an engine's image or environment, with the engine's own Python: it imports the
standard library and what is there.

Nothing here imports the gateway, so that a host can mount this folder alone, read-only, and run
`python -m inside`. The same code asks the engines' bare sources on a machine without a GPU, which
is how tests/conformance gets its answers.
"""
