"""Starts processes that train: the ranks of one command, or the jobs of a sweep."""
