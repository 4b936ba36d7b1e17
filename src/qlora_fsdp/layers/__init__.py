"""What a model computes in a step: quantized layers, adapters, attention, norms and the loss."""
