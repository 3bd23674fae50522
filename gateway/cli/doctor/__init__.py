"""`fitserve doctor`: readings of this machine, checks of them, and safe fixes."""
