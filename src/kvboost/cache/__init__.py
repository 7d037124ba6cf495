"""The cache: chunks of KV, found by their tokens. Knows nothing of transformers."""
