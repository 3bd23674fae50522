"""Events: detected once, stored, and delivered to listeners."""
