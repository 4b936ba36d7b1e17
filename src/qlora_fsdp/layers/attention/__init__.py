"""Attention that keeps packed rows apart, and its kernels."""
