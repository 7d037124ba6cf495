"""The use of cached text for a prompt: plan it in spans, move keys, repair moved rows."""
