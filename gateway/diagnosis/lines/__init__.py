"""The lines of a log: from its bytes, without prefixes of carriers, and their forms."""
