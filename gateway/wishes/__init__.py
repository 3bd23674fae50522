"""Wishes of users, in requests and files."""
