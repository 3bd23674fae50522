"""Model folders and Hugging Face repositories: read without their weights, and downloaded."""
