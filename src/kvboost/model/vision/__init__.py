"""Images: reading files, what models make of them, and vision towers."""
