"""Which kernel each linear layer and each layer of experts gets."""
