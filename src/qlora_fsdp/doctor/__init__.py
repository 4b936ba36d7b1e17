"""Checks whether a host can train.

Each module has the checks of one topic, which yield findings. `__main__` is the command that runs them all.
"""
