"""Conditions of rules, and the subjects that they are tested on."""
