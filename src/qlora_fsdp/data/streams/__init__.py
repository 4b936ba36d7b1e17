"""Data that is read while it is trained on: windows of rows, which the ranks make together."""
