"""TokenStats of two rows that answer each other → a sum over the tokens of a text."""
