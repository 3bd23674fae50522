"""Model families: config.json -> what an engine builds. registry.py has the table of all."""
