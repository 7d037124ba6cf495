"""Ollama's API, translated to chat and completion requests."""
