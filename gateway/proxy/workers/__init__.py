"""Worker processes that answer clients, and their link to the control process."""
