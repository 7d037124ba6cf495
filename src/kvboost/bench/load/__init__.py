"""Servers and caches under load."""
