"""Models with towers for images or sound beside the text decoder, which alone is trained here."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def find_decoder(model: PreTrainedModel) -> tuple[str, nn.Module] | None:
    """Name and module of the text decoder inside a multimodal model; None for a model of text alone."""
    decoder = model.get_decoder()
    if decoder is getattr(model, model.base_model_prefix, None):
        return None
    name = next(name for name, module in model.named_modules() if module is decoder)
    return (name, decoder) if "." in name else None
