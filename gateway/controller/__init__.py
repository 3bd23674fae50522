"""The control loop: the only writer of state, which starts and stops engines until wishes are
met."""
