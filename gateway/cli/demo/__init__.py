"""The tiny model that `scripts/serve` makes."""
