"""What has been read before: chunks of KV, found by their tokens. Knows nothing of transformers."""
