"""Several servers as one: a router that sends a request to the server that has read its text."""
