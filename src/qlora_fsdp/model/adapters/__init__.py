"""Adapters: which layers get them, their first values, how they are saved and read, and their model card."""
