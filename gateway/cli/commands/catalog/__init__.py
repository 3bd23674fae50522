"""Commands that find models, and that take over those of other programs."""
