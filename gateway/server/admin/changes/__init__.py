"""Changes of models by the admin API, and their history."""
