"""Pure decisions of the controller: the next action for each replica and model."""
