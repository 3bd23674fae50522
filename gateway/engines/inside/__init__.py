"""Code that runs inside an engine's image or environment, in the engine's own Python.

Only the standard library and packages of the engine are imported. Nothing here imports the gateway,
so a host can mount only this folder, read-only, and run `python -m inside`. On a machine without a
GPU the same code questions the engines' bare sources; tests/conformance gets its answers so.
"""
