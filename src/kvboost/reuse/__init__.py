"""How cached text serves a prompt: plan it in spans, move keys, repair moved rows."""
