"""Model families: config.json to the Blueprint of an engine. registry.py has the table."""
