"""The OpenAI surface: which endpoints there are, and how requests are read."""
