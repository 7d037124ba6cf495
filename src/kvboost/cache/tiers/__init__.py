"""Places where chunks are kept, all under one small contract."""
