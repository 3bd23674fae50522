"""LoRA adapters: small changes of a model's weights that an engine serves together with the model
itself."""
