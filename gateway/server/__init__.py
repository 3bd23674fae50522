"""The network side: the OpenAI data plane, the admin API, the page."""
