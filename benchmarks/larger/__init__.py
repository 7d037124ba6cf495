"""``bench larger``: models and contexts that are larger than a GPU's memory."""
