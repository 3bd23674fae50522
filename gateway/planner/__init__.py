"""From everything that is known to ranked plans."""
