"""Triton kernels, and 4-bit quantization on a CPU: plain tensors go in and come out.

A Triton kernel gets every pointer, size and stride as an argument of its own, and can't call the code around it. So
kernels have more parameters and more lines than functions elsewhere in this project.
"""
