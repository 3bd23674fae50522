"""Questions to an engine's own code, about a version and about models, without weights."""
