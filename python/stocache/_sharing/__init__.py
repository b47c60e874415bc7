"""Which processes share a cache, and what its samples depend on."""
