"""Text from a whole model that does not wait for Python: slots for keys and values, and steps as CUDA graphs."""
