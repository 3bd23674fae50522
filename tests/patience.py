"""How long a test waits before it calls a thing hung: never a figure of the product, for a busy machine has no such figures."""

HANG_S = 60.0
