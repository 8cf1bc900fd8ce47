"""Arguments of the verbs that this package adds to ``ngramloss``."""
