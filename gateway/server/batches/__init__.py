"""OpenAI's Files and Batches API: files of keys, and requests that run when engines are free."""
