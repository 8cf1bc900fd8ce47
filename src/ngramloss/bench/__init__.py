"""a machine → what things cost on it, beside their peers in the same run."""
