"""How a checkpoint is quantized."""
