"""Many users at once: the loop that serves them together, and the server in front of it."""
