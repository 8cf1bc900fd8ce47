"""TokenStats and labels → what n-grams, or alignments, of a text are worth."""
