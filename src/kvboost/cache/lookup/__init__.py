"""Finding stored chunks: by prefix, and by content at any offset."""
