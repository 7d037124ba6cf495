"""Text and token ids: encoding, cutting, keys. No tensors, no models."""
