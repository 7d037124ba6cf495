"""How models write reasoning and calls of tools, and how to read it."""
