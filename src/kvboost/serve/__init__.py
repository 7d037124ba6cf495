"""The HTTP server: OpenAI's API, administration, and a page."""
