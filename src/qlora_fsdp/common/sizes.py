"""Numbers that several parts of the program must agree on. Imports nothing, so that the memory plan needs no torch."""

# A target that has no loss, as in torch.nn.functional.cross_entropy.
IGNORE_INDEX = -100

# The loss (layers/head_loss.py) holds at most this many bytes of logits at a time. Its chunks are a multiple of this
# many tokens, which suits matrix kernels.
LOGITS_BYTES = 256 * 2**20
MIN_CHUNK = 256


def loss_chunk(vocab_size: int, logit_bytes: int = 4) -> int:
    """Returns the number of tokens that go through the head at a time, if each logit takes `logit_bytes`."""
    return max(MIN_CHUNK, LOGITS_BYTES // (logit_bytes * vocab_size) // MIN_CHUNK * MIN_CHUNK)


# Files are read (weights/row_reader.py) in pieces of this size, into this many host buffers.
PIECE_BYTES = 32 * 2**20
NUM_BUFFERS = 12

# In bitsandbytes' 4-bit formats, this many weights share a scale, and this many scales share a scale of their own.
BLOCKSIZE = 64
NESTED_BLOCKSIZE = 256

# A checkpoint is written from a copy of the trained state, which is in slabs of host memory of this size.
SLAB_BYTES = 64 * 2**20

PINNED_UNIT = 2**21  # bytes; a huge page


def round_up(number: int, unit: int) -> int:
    """Returns the smallest multiple of `unit` that is not below `number`."""
    return -(number // -unit) * unit


def next_power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def offload_buffer_bytes(num_bytes: int) -> int:
    """Bytes of the host buffer in which an offloaded tensor of `num_bytes` waits for backward."""
    return round_up(num_bytes, PINNED_UNIT)
