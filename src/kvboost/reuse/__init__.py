"""How what was read before serves this prompt: planned in spans, put in place."""
