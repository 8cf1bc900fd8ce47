"""A name → a model and a tokenizer that are ready to train or to write."""
