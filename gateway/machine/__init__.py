"""The machine: its GPUs, their memory and links, and their failures."""
