"""Formulas and whole losses with few kernel launches, on a GPU."""
