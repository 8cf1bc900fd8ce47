"""Systems that the paper compares with, to train on anybody's data: a recipe and data → a trained system → texts."""
