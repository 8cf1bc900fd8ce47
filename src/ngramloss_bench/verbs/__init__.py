"""Arguments of the verb that this package adds to ``ngramloss``."""
