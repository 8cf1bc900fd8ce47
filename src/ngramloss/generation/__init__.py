"""A model and texts → texts."""
