"""Predicts, before a run starts, how much GPU and host memory it needs and how long it takes. Imports no torch."""
