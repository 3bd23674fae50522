"""Plans for requests: in a process of its own for a gateway, or offline."""
