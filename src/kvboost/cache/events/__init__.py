"""KV events: telling routers which blocks of text the cache holds, in vLLM's format."""
