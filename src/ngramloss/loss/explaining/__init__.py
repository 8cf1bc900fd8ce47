"""a sentence pair and an objective → what it rewards, and how it changes the model."""
