"""A model on meta: it is found, tried, built, given adapters and the loss of its task."""
