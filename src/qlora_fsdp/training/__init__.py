"""A training run. run.py calls its parts one after another, and loop.py is the algorithm."""
