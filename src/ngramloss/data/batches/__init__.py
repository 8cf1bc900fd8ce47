"""Lengths of examples → plans, padded micro-batches, averaged gradients."""
