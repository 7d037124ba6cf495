"""KVBoost in Ray Serve: the only package that imports ray."""
