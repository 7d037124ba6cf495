"""HTTP itself: bodies, connections, limits, headers, JSON, threads, the OpenAPI document."""
