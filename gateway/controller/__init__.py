"""The loop that brings what runs to what is wanted; it is the only writer."""
