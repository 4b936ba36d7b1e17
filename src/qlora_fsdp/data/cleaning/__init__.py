"""Rows of the training data that are left out: too short or long, repeated, or held out too."""
