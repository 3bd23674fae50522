"""Methods that draft tokens, and reasons against each."""
