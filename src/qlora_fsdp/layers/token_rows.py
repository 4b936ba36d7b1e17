"""Embeddings and head with trained rows for new tokens, computed beside a table that stays as it is.

PEFT's own trainable tokens write the trained rows into a copy of the whole table at each call. Here the
table is looked up, or multiplied with, as it is. The few trained rows are computed apart, and their results put in.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from torch.nn import functional as F

ADAPTER = "default"  # the name that PEFT gives an adapter


class TokenRows(TrainableTokensLayer):
    """Embeddings or a head with trained rows in the place of some of the table's rows, and after its end.

    Attributes:
        slots: int64 [num_tokens], the trained row of a token id, or -1.
        replaced: int64, the token ids of the first trained rows: those for which the table has a row too.
    """

    slots: Tensor
    replaced: Tensor

    @property
    def rows(self) -> nn.Parameter:
        """The trained rows, float32 [num_rows, hidden size], by ascending token id."""
        return cast(nn.Parameter, self.trainable_tokens_delta[ADAPTER])

    def get_merged_weights(self, active_adapters: Any) -> Tensor:
        """What a model's code sees as this module's `weight`: the table, which is asked for its dtype and device.

        PEFT would copy it with the rows put in, at each access. It may be sharded, and rows may lie after its end.
        """
        return cast(Tensor, self.base_layer.weight)

    def forward_adapters(self, x: Tensor, active_adapters: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Embeddings of token ids x, or logits of hidden states x, with the trained rows among them."""
        if isinstance(self.base_layer, nn.Embedding):
            slots = self.slots[x]
            old = self.base_layer(x.where(slots < 0, 0))
            new = F.embedding(slots.clamp(min=0), self.rows.to(old.dtype))
            scale = self._get_embed_scale()  # type: ignore[no-untyped-call]
            new = new if scale is None else new * scale.to(new.dtype)
            return torch.where((slots >= 0).unsqueeze(-1), new, old)
        return join_columns(self.base_layer(x), F.linear(x, self.rows.to(x.dtype)), self.replaced)


def plain_table(module: nn.Module) -> nn.Module:
    """The table under trained rows; any other module as it is."""
    return module.token_adapter.base_layer if isinstance(module, TrainableTokensWrapper) else module


def join_columns(old: Tensor, new: Tensor, replaced: Tensor) -> Tensor:
    """Logits [..., V] of a table joined with logits [..., n] of trained rows.

    The first trained rows are for the columns `replaced` of the table, the others come after its last column.
    """
    k = len(replaced)
    joined = old.index_copy(-1, replaced, new[..., :k]) if k else old
    return torch.cat([joined, new[..., k:]], -1) if new.shape[-1] > k else joined
