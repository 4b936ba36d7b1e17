"""Numbers that several parts of the program must agree on. Imports nothing, so that the memory plan needs no torch."""

# A target that has no loss, as in torch.nn.functional.cross_entropy.
IGNORE_INDEX = -100

# The loss (layers/head_loss.py): at most so many bytes of fp32 logits at a time, and chunks of a multiple of so many
# tokens, which suits matrix kernels.
LOGITS_BYTES = 256 * 2**20
MIN_CHUNK = 256


def loss_chunk(vocab_size: int) -> int:
    """Tokens that go through the head at a time."""
    return max(MIN_CHUNK, LOGITS_BYTES // (4 * vocab_size) // MIN_CHUNK * MIN_CHUNK)


# Reading (weights/row_reader.py): pieces of files, and host buffers for them.
PIECE_BYTES = 32 * 2**20
NUM_BUFFERS = 12

# bitsandbytes' 4-bit formats: weights that share a scale, and scales that share one.
BLOCKSIZE = 64
NESTED_BLOCKSIZE = 256

# The copy of the trained state that a checkpoint is written from (checkpoint_write.py): slabs of host memory.
SLAB_BYTES = 64 * 2**20
