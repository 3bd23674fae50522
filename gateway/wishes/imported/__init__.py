"""Models of other programs' files as models of fitserve, and what has no equal here. Pure."""
