"""Requests on their way: planned, put together, batched, run and answered."""
