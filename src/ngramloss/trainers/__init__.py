"""Trainers of other libraries → the same trainers with a joint objective, one file a library."""
