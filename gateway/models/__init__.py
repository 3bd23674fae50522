"""Models: config.json, model families, tensors, adapters and drafters."""
