"""What an engine version builds of a model: layers and their weights."""
