"""Texts → scores of each document. Needs no torch."""

from ngramloss.metrics.rouge import rouge

__all__ = ["rouge"]
