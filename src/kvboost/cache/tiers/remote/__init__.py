"""A tier on another machine: Redis, or whatever fsspec can open."""
