"""fitserve: a self-hosted serving gateway that configures inference engines for the GPUs it finds."""

__version__ = "0.1.0"
