"""Steps on answers that the model writes itself: it writes, functions reward, the model learns."""
