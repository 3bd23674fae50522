"""What drafts tokens, or why nothing does."""
