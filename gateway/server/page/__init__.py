"""The page at `/`: its files, and the state that it shows, as it changes."""
