"""Access: keys, scopes, rate limits, and counts of wrong keys."""
