"""Far rows: KV of requests that are larger than the memory for it. The first rows of such a request
are in the host's memory (of a model on a GPU) or in a file (of a model on a CPU)."""
