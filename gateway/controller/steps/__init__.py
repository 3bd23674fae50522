"""What the loop does about a replica or a changed wish, step by step; each may be cut off
anywhere."""
