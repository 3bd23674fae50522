"""Several processes that answer clients, and the control process that has the state."""
