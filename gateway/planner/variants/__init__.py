"""One variant: its layout, kernels, sizes, and the plan."""
