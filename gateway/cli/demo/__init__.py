"""`fitserve demo` and its tiny model."""
