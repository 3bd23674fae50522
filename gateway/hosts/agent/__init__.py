"""Docker, reached by a process that clients cannot reach: the agent, its policy, and the host that
asks the agent."""
