"""What a model says of every row of a file. `__main__` is the command, and `predictor` what a trained head says."""
