"""A study: one question, many trainings, one table. Planning and showing need no torch."""
