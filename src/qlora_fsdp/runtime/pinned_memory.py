"""Pinned host memory of any size, which a GPU copies from and to without the CPU.

torch pins memory in powers of two: an input of 3.05 GiB, of 400,000 tokens of an 8B model, would take 4 GiB. So large
buffers are ordinary memory here, which is pinned afterwards. Most of the time that takes is for the system to find and
clear the pages, and several threads do that.
"""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

NUM_THREADS = 8
PART_BYTES = 2**26  # that a thread takes at a time
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU, not for the current one alone


def pinned_buffer(num_bytes: int) -> Tensor:
    """Pinned host memory, uint8 [num_bytes], which is let go together with the tensor.

    Raises:
        RuntimeError: the host has too little memory, or may not pin as much.
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(Tensor.zero_, buffer.split(PART_BYTES)))
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, PORTABLE))
    weakref.finalize(buffer, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
    return buffer
