"""Runs that repeat to the bit on GPUs (`training.deterministic`).

A sum of floating-point numbers depends on its order, and the fastest kernels add in whatever order their threads
arrive: two runs of one command differ by 2e-5 in the first gradient norm. Here the libraries are told to keep one
order:

- torch takes deterministic kernels, such as that of attention's backward, and raises an error where it has none.
- cuBLAS gets workspaces of a fixed number and size, without which products on several streams may differ.
- FlashAttention-2 is asked through a variable that transformers reads.
- NCCL leaves NVLink's switches out of its sums, because they promise no order.

The Triton kernels of this project and of Liger, as far as they are used here, add without atomics: each sum has one
program and one order. So do bitsandbytes' kernels. FlashAttention-4 and the kernels of recurrent layers do not:
FlashAttention-4 is refused (config/check_training.py), and torch computes recurrent layers (model/trials/packing.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from qlora_fsdp.common.errors import ConfigError, Problem

# Libraries read these when they start: cuBLAS with its first handle, NCCL with its first communicator.
VARIABLES: Mapping[str, str] = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
    "NCCL_NVLS_ENABLE": "0",
}
_NO_KERNEL = re.compile(r"^(\S+) does not have a deterministic implementation")


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """A context in which GPUs add in one order, if that is wanted. To be entered before a GPU computes anything.

    Raises:
        ConfigError: torch has no deterministic kernel for something that the run computes.
    """
    if not wanted:
        yield
        return
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    deterministic: Any = torch.utils.deterministic
    fills = deterministic.fill_uninitialized_memory
    # torch would fill every new tensor, in case that somebody reads it before it is written. That takes time.
    deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if (found := _NO_KERNEL.match(str(error))) is None:
            raise
        reason = f"can't be kept: torch has no deterministic kernel for {found[1]}, which this model needs."
        fix = "Set training.deterministic=false, or model to another one."
        raise ConfigError([Problem("training.deterministic=true", reason, fix)]) from error
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills
