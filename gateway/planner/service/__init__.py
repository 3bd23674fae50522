"""From a wish to a decision: reads the model and asks the planner, which is pure; for a gateway
that runs, in a process of its own."""
