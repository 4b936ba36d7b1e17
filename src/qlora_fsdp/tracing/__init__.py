"""Runs a model on meta, one layer of each kind, and reads off what it keeps and computes, for the memory plan."""
