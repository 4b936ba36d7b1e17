"""Forward and backward of a micro-batch, launched kernel by kernel or as a CUDA graph."""
