"""TokenStats and labels → a sum over the tokens of a text."""
