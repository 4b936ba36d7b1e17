"""What a small model of the same class shows about the real one, before it is built."""
