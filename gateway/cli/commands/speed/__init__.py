"""Commands that measure a served model: its speed, and a faster plan."""
