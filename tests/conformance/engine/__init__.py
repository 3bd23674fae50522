"""Asks an engine's own Python selection code, on a machine without a GPU.

`python -m tests.conformance.engine` boots one engine version for one compute capability in one
process (engines keep both in module constants) and prints the answers of one questions module as
JSON. It runs with a Python that has torch and the engine's pure Python dependencies, not with the
project's own. See scripts/engine-answers.
"""
