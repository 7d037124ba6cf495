"""HTTP in a process of its own: the engine's side, the API's side, and what goes between them."""
