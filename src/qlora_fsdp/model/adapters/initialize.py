"""Fill the adapters' first values, once they are sharded and the base is loaded.

Every rank draws the whole small matrix from the same seed and keeps its own rows, so that the values do not depend on
the number of ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import cast

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.config.adapter.adapter_config import PREFIX
from qlora_fsdp.data.tokenizer import NO_TOKENS, AddedTokens
from qlora_fsdp.layers.lora import LoraEmbedding
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.new_tokens import fill_copy, initialize_rows
from qlora_fsdp.runtime.rows import gather_rows, local_rows, local_tensor, shard_group


@torch.no_grad()
def initialize_adapters(
    model: peft.PeftModel,
    init_lora_weights: bool | str,
    seed: int,
    tokens: AddedTokens = NO_TOKENS,
    filled: Collection[LoraLayer] = (),
) -> None:
    """Fill the adapters' shards. The values depend on the seed, not on the number of ranks. Collective.

    The base must be loaded already: `modules_to_save` start from its weights, new tokens from the mean of its rows, and
    DoRA's magnitudes from the norms of its dequantized rows. All ranks give the same seed.

    Args:
        model: PEFT's model, sharded or not.
        init_lora_weights: as PEFT has it: true, `gaussian`, `orthogonal` or `loftq`.
        seed: of all that is drawn.
        tokens: the tokens whose rows are trained.
        filled: layers of PEFT's whose matrices have their values already (model/adapters/rounding_error.py).

    Raises:
        AdapterError: a row of a base weight under DoRA is all zero, so that its magnitude over its norm would be NaN.
    """
    base = cast(PreTrainedModel, model.get_base_model())
    tables = [base.get_input_embeddings(), base.get_output_embeddings()]
    for name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            originals = dict(module.original_module.named_parameters())
            is_table = any(module is table for table in tables)
            for key, param in module.modules_to_save[ADAPTER].named_parameters():
                fill_copy(param, originals[key], tokens.fresh if is_table else frozenset())
        if isinstance(module, TrainableTokensWrapper):
            initialize_rows(module, tokens.fresh)
        if isinstance(module, LoraEmbedding):
            table_a = module.lora_embedding_A[ADAPTER]
            table_b = module.lora_embedding_B[ADAPTER]
            values_b = torch.empty(table_b.shape).normal_(generator=_generator(seed, name))
            first, last = local_rows(table_b)
            local_tensor(table_b).copy_(values_b[first:last])
            local_tensor(table_a).zero_()
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A and module not in filled:
            lora_a = cast(nn.Linear, module.lora_A[ADAPTER]).weight
            lora_b = cast(nn.Linear, module.lora_B[ADAPTER]).weight
            generator = _generator(seed, name)
            values_a, values_b = _draw(init_lora_weights, lora_a.shape, lora_b.shape, module.r[ADAPTER], generator)
            for weight, values in ((lora_a, values_a), (lora_b, values_b)):
                first, last = local_rows(weight)
                local_tensor(weight).copy_(values[first:last])
            if ADAPTER in getattr(module, "lora_magnitude_vector", {}):
                delta = (values_b @ values_a) * module.scaling[ADAPTER]
                magnitude = cast(DoraLinearLayer, module.lora_magnitude_vector[ADAPTER]).weight
                _fill_magnitude(name, magnitude, cast(nn.Linear, module.get_base_layer()), delta)


def draw_plain_start(shape_a: torch.Size, seed: int, name: str) -> Tensor:
    """A [r, in] in float32, as `initialize_adapters` fills it where `init_lora_weights` is true.

    Args:
        shape_a: its shape.
        seed: as there.
        name: the layer's name in PEFT's model.
    """
    rank = shape_a[0]
    values_a, _ = _draw(True, shape_a, torch.Size((0, rank)), rank, _generator(seed, name))
    return values_a


def _generator(seed: int, name: str) -> torch.Generator:
    """Random numbers of a layer's own."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def _draw(
    init: bool | str, shape_a: torch.Size, shape_b: torch.Size, rank: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A [r, in] and B [out, r] in float32, drawn as PEFT draws them for the same `init_lora_weights`.

    With `loftq` they are those of layers that are not quantized, which have nothing to correct: the plain start.
    Adapters of fused experts have their matrices in one: A [E r, in] and B [out, r E].
    """
    in_features = shape_a[1]
    values_a, values_b = torch.empty(shape_a), torch.zeros(shape_b)
    init = str(init).lower()
    if init in ("true", "loftq"):
        bound = math.sqrt(1 / in_features)  # kaiming_uniform_(a=sqrt(5))
        return values_a.uniform_(-bound, bound, generator=generator), values_b
    if init == "gaussian":
        return values_a.normal_(0.0, 1 / rank, generator=generator), values_b
    assert init == "orthogonal", init
    basis, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
    values_a = (torch.randn(in_features, rank // 2, generator=generator) @ basis[0::2]).t() / 10
    values_b = (torch.randn(rank // 2, shape_b[0], generator=generator).t() @ basis[1::2]) / 10
    return values_a.contiguous(), values_b


def _fill_magnitude(name: str, magnitude: Tensor, base: nn.Linear, delta: Tensor) -> None:
    """Fill this rank's rows of DoRA's magnitudes: norms of the rows of W + delta (arXiv:2402.09353, section 4.1)."""
    first, last = local_rows(magnitude)
    weight = _dequantize_local_rows(base) if isinstance(base, QuantizedLinear) else local_tensor(base.weight)
    norms = torch.linalg.vector_norm(weight.float() + delta[first:last].to(weight.device), dim=1)
    if not norms.all():  # for example a padding token's row in a tied head; forward would compute 0 / 0
        name = name.removeprefix(PREFIX)
        raise AdapterError(
            f"lora.use_dora=true: {name} has rows that are all zero, and so no direction for DoRA to keep. Add {name} "
            "to lora.exclude_modules, or set lora.use_dora=false."
        )
    local_tensor(magnitude).copy_(norms)


def _dequantize_local_rows(layer: QuantizedLinear) -> Tensor:
    """The rows of the weight that this rank holds, dequantized. Collective."""
    parts = {
        name: gather_rows(local_tensor(part), part.shape[0], shard_group(part))
        for name, part in zip(layer.part_names, layer.parts(), strict=True)
    }
    first, last = local_rows(layer.codes)
    weight = layer.format.dequantize(parts, layer.out_features, layer.in_features, layer.compute_dtype)
    return weight[first:last]
