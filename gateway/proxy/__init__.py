"""The data plane: from a client's connection to an engine's and back."""
