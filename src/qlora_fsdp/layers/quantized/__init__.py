"""Weights that are stored as codes and scales, and products with them."""
