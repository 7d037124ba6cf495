"""Text and ids: encoding, splitting, keys. Knows nothing of tensors or models."""
