"""Plans over the nodes of a cluster."""
