"""a machine → what things cost on it, compared with other libraries in the same run."""
