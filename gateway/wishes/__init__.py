"""What users ask for, in requests and in files: read, and checked as a whole."""
