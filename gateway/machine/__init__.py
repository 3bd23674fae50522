"""What is read from the machine: its GPUs, their memory and links, and what befalls them."""
