"""Layers that carry a state from token to token: they know where rows begin, so rows can be packed."""
