"""``python -m benchmarks larger``: a model that is larger than a GPU's memory."""
