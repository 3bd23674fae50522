"""The engine is asked: what one version of an engine has, and what it makes of a model, by its own
code, without weights."""
