"""Texts aligned by id → scores, tests and tables."""
