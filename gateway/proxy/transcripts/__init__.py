"""Copies of requests and answers for transcripts, which another process writes."""
