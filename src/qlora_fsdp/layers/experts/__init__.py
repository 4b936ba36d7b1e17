"""Mixtures of experts: experts in 4 or 8 bits, an adapter for each, and their products."""
