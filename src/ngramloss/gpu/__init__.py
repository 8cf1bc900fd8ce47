"""Formulas and whole losses in few launches, on a GPU."""
