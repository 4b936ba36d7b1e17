"""A model's parameters, split over ranks: sharded, loaded, read from other GPUs, and proven."""
