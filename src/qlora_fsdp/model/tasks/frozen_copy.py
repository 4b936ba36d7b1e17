"""The adapter as it was at the start, for passes without gradients beside the one that is trained.

Preference losses compare the model that is trained with a reference. Where training goes on from an adapter, the
reference is that adapter on the same base. A second model would take the base's memory twice. So only the trained
parameters are copied, sharded as they are, and for a pass of the reference they change places with the copies: values
are exchanged within the same memory, so that FSDP, the optimizer and a captured CUDA graph see the tensors that they
know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qlora_fsdp.runtime.fsdp_state import free_gathered
from qlora_fsdp.runtime.rows import local_tensor


class FrozenCopy:
    """A copy of this rank's rows of every trained parameter, as they are when it is made.

    It takes the memory of the adapter's shard once, where that is: on the GPU, or on the host with fsdp.cpu_offload.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.copies = [local_tensor(param).clone() for param in self.params]
        self.is_in_place = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it lasts, the model computes with the copies, without gradients. Every rank enters it.

        It is for whole calls of the model: it may not begin inside a forward, nor between a forward and its backward.
        """
        assert not self.is_in_place, "the copies are in place already"
        self._exchange()
        try:
            with torch.no_grad():
                yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange parameters and copies, one after another: no more than one parameter is held twice."""
        for param, copy in zip(self.params, self.copies, strict=True):
            local = local_tensor(param)
            held = local.clone()
            local.copy_(copy)
            copy.copy_(held)
        free_gathered(self.model)  # what is still gathered has the values of before
        self.is_in_place = not self.is_in_place
