"""Bodies of requests: reading of their fields, and the memory that they take."""
