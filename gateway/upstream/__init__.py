"""HTTP/1.1 towards the workers: one pool of connections per worker."""
