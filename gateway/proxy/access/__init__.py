"""Who may call, for what and how much: keys, scopes, limits, wrong keys."""
