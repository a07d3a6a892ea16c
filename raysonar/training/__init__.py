"""Training of the small models that raysonar ships, so that a demo needs no download."""
