"""Transcripts: requests and answers that are kept, encrypted, for a time."""
