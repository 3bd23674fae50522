"""Measuring this machine once: which of its GPUs are free, what is asked, what comes back, and what
is kept of it."""
