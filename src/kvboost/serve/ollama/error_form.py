"""Which endpoints answer errors as Ollama's clients expect: ``{"error": message}``."""

from __future__ import annotations


def is_ollama(path: str) -> bool:
    """Whether the endpoint at ``path`` is one of Ollama's API."""
    return path.startswith("/api/")
