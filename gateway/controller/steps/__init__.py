"""The steps of the loop for replicas and changed wishes. Each may be cut off anywhere."""
