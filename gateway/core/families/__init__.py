"""One function per model family: config.json -> what an engine builds."""
