"""What an engine's log says of its failure."""
