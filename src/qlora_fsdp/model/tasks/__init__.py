"""What a model is trained for: the module that is sharded and called, with the loss of its task."""
