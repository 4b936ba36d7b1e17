"""Errors, files, text, and what both layers and the plan need to know. Imports no torch."""
