"""Texts aligned by id → scores, significance tests and tables."""
