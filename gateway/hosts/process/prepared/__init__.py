"""Engine processes that are forked from one that has imported the engine."""
