"""The parts of a plan: choices with reasons, variables and warnings."""
