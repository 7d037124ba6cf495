"""From a parsed request to its answer: prompts, the engine's streams, and what is written."""
