"""Everything that reaches into Hugging Face's transformers."""
