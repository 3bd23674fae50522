"""People instead of keys: from a trusted proxy, or by OpenID Connect."""
