"""The failure of an engine by its log, and the facts that it teaches."""
