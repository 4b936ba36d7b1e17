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

# In compressed-tensors' int4, as many weights share a scale as one of these, for which servers have kernels.
GROUP_SIZES = (32, 64, 128)

# Matrices of fewer elements keep bitsandbytes' 8-bit optimizers' state in float32. It is its own threshold.
MIN_8BIT_ELEMENTS = 4096

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


# Matrix products run faster on lengths that are multiples of this.
LENGTH_MULTIPLE = 8
# Padded sequences have one of some fifty lengths, as each needs a CUDA graph of its own: eight between two powers of
# two, and no two nearer to each other than 1/512 of max_length. So of all but the shortest a ninth is padding at most.
LENGTHS_AN_OCTAVE = 8
MAX_STEPS = 512


def round_length(longest: int, max_length: int) -> int:
    """Returns the tokens of a padded sequence: those of the longest row, rounded up to one of a few numbers."""
    octave = 2 ** (longest.bit_length() - 1)
    step = max(octave // LENGTHS_AN_OCTAVE, round_up(max_length // MAX_STEPS, LENGTH_MULTIPLE), LENGTH_MULTIPLE)
    return min(round_up(longest, step), max_length)


def num_lengths(max_length: int) -> int:
    """Returns how many lengths padded sequences may have."""
    length = number = 0
    while length < max_length:
        length = round_length(length + 1, max_length)
        number += 1
    return number


NUM_AHEAD = 1  # layers that FSDP gathers ahead of the one that runs, in forward and in backward
