"""NEFTune (arXiv:2310.05914): noise that is added to the embeddings of training rows.

Each value gets a uniform random number between -m and m, where m = alpha / sqrt(tokens of the row x hidden size), as in
transformers. There a padded batch counts its padding; here a row has the noise of its own length, packed or padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qlora_fsdp.data.batch import Batch


class EmbeddingNoise:
    """Adds the noise to what the embeddings of a batch are.

    Args:
        alpha: how much noise.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._lengths: Tensor | None = None  # of the rows of the present batch; None where no noise is wanted

    def prepare(self, batch: Batch, is_training: bool) -> None:
        """Note the rows of the batch whose embeddings come next; held-out rows get no noise."""
        self._lengths = row_lengths(batch) if is_training else None

    def add(self, embedded: Tensor) -> Tensor:
        """Embeddings [..., D] with noise, if the batch gets some."""
        if self._lengths is None:
            return embedded
        magnitudes = self.alpha * (self._lengths * embedded.shape[-1]).clamp(min=1).float().rsqrt()
        noise = torch.empty(embedded.shape, dtype=torch.float32, device=embedded.device).uniform_(-1.0, 1.0)
        noise.mul_(magnitudes.view(*embedded.shape[:-1], 1))
        return embedded + noise.to(embedded.dtype)


def row_lengths(batch: Batch) -> Tensor:
    """How many tokens the row of each token has, without padding: int64 [B, L], without asking the device."""
    assert batch.num_tokens is not None
    length = batch.input_ids.shape[1]
    column = torch.arange(length, device=batch.input_ids.device)
    is_token = (column < batch.num_tokens[:, None]).long().flatten()
    row = ((batch.position_ids == 0).flatten().cumsum(0) - 1).clamp(min=0)
    counts = torch.zeros_like(is_token).scatter_add_(0, row, is_token)
    return counts[row].view(batch.input_ids.shape)
