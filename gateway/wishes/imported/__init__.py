"""Models of other programs' files as models of fitserve, and the settings without an equal here.
Pure."""
