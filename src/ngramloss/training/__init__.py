"""A recipe → a trained run."""
