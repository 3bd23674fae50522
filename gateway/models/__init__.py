"""What a model is: its config, its families, its tensors."""
