"""Docker behind an agent: the agent process, its policy, and the host that calls it."""
