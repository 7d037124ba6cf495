"""Estimates of a model's memory and speed on this machine, from the headers of its files:
nothing is loaded, and no weights are downloaded."""
