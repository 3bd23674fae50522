"""What measurements of served models are good for: what is learned from them, and which other plan
should be better."""
