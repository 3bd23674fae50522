"""The bodies of requests: what is read of them, and the memory for them."""
