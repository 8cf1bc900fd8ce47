"""statistics and labels → one value a row: a formula each."""
