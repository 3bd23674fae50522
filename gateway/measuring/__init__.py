"""How fast engines and GPUs are."""
