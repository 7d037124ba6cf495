"""What a model would need and how fast it would be on this machine, from the headers of its files:
nothing is loaded, and no weights are downloaded."""
