"""LoRA adapters: small changes of a model's weights that an engine serves beside the model
itself."""
