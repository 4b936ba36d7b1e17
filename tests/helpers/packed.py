"""Do packed rows see one another? A plain check with stock transformers, independent of the trial that runs make."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.helpers.checkpoints import FAMILIES, OTHER_FAMILIES, SHAPE

SMALL = FAMILIES | OTHER_FAMILIES
# What the defaults of a family leave out of its real configs.
REAL: dict[str, dict[str, object]] = {
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "granitemoehybrid": {"layer_types": (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 4) * 4}
    | {"num_hidden_layers": 40, "position_embedding_type": None},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "bert": {"is_decoder": True},
    "granite": {"logits_scaling": 8.0},
}


def real_config(family: str) -> PretrainedConfig:
    """A family's config at the size that its class has by default, which is that of a published model."""
    return AutoConfig.for_model(family, **REAL.get(family, {}))


def packed_rows_stay_apart(family: str) -> bool:
    """Whether rows one behind another, with positions that begin anew, have the logits that they have alone."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **SMALL[family]}, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    rows = [torch.randint(0, 250, (length,)) for length in (18, 30, 22)]
    with torch.no_grad():
        alone = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
        packed = _pack(model, rows)
        changed = _pack(model, [row.flip(0) if index != 1 else row for index, row in enumerate(rows)])
    largest = max(float(logits.abs().max()) for logits in alone)
    is_equal = all(float((a - b).abs().max()) < 1e-4 * largest for a, b in zip(packed, alone, strict=True))
    return is_equal and float((packed[1] - changed[1]).abs().max()) < 1e-4 * largest


def _pack(model: torch.nn.Module, rows: list[Tensor]) -> list[Tensor]:
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    logits = model(input_ids=torch.cat(rows)[None], position_ids=positions[None], use_cache=False).logits[0]
    return list(logits.split([len(row) for row in rows]))
