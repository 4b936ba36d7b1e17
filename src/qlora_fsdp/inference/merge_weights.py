"""Merge an adapter into single weights of its base: which weights it changes, and what they become."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import bitsandbytes.functional as bnb
import torch
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from safetensors import safe_open
from torch import Tensor, nn

from qlora_fsdp.common.sizes import BLOCKSIZE, NESTED_BLOCKSIZE
from qlora_fsdp.config.commands import ADAPTER_WEIGHTS
from qlora_fsdp.layers import Format, QuantizedLayer, QuantizedLinear
from qlora_fsdp.layers.lora import LoraLinear
from qlora_fsdp.layers.quantized_format import code_book
from qlora_fsdp.model.adapters import ADAPTER
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.build import MetaModel
from qlora_fsdp.weights.assignment import Assignment
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.finite import check_finite
from qlora_fsdp.weights.safetensors_files import StoredTensor
from qlora_fsdp.weights.scaled import ScaledTensor, read_dequantized
from qlora_fsdp.weights.stored_quantization import weight_shape

VALUES_A_TIME = 2**22  # of a weight, in float32: 16 MiB, which the allocator reuses; larger blocks need new pages


@dataclass(frozen=True)
class Merge:
    """What is merged into what.

    Attributes:
        trained: the base with the adapter's layers, on meta.
        adapter: folder of the adapter.
        out: folder of the result.
        dequantized: merge into the quantized weights that the adapter was trained on, not the full-precision ones.
        quantize: write the linear layers in this format of transformers and bitsandbytes; None: as the base has them.
        device: where weights are quantized and adapters are multiplied.
    """

    trained: AssembledModel
    adapter: Path
    out: Path
    dequantized: bool
    quantize: Literal["nf4", "fp4"] | None
    device: torch.device

    @property
    def meta(self) -> MetaModel:
        """The base on meta, and what fills it."""
        return self.trained.meta

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the base is quantized, as in training."""
        return self.trained.dtype


def find_changes(merge: Merge) -> dict[str, dict[str, Tensor]]:
    """The adapter's tensors by the name of the base's parameter that they change.

    Returns:
        For each parameter its change: LoRA's matrices with their `scaling`, `whole` for a parameter that was trained in
        full, or `rows` of new tokens with their `ids`.
    """
    changes: dict[str, dict[str, Tensor]] = {}
    token_rows: dict[nn.Module, dict[str, Tensor]] = {}  # one entry for two tables that are tied
    with safe_open(merge.adapter / ADAPTER_WEIGHTS, "pt") as file:
        stored = {key.removeprefix("base_model.model."): key for key in file.keys()}  # noqa: SIM118
        for name, module in merge.trained.model.base.named_modules():
            if isinstance(module, LoraLinear):
                parts = {part: f"{name}.{part}" for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")}
                found = {part: file.get_tensor(stored[key]) for part, key in parts.items() if key in stored}
                changes[f"{name}.weight"] = found | {"scaling": torch.tensor(module.scaling[ADAPTER])}
            elif isinstance(module, ModulesToSaveWrapper):
                for key, _ in module.original_module.named_parameters():
                    changes[f"{name}.{key}"] = {"whole": file.get_tensor(stored[f"{name}.{key}"])}
            elif isinstance(module, TrainableTokensWrapper):
                layer = module.token_adapter
                if layer.tied_adapter is None:
                    rows = file.get_tensor(stored[f"{name}.token_adapter.trainable_tokens_delta"])
                    token_rows[layer] = {"rows": rows, "ids": torch.tensor(layer.token_indices[ADAPTER])}
                changes[f"{name}.weight"] = token_rows[layer.tied_adapter or layer]
    return changes


def merged_weight(assignment: Assignment, changes: dict[str, dict[str, Tensor]], merge: Merge) -> Tensor:
    """A weight of the base with the adapter merged into it, on the CPU."""
    change = changes.get(assignment.name, {})
    stored_dtype = None if assignment.stored is None else assignment.stored.dtype
    if isinstance(assignment.stored, ScaledTensor):  # written like the layers that are not
        stored_dtype = merge.dtype
    dtype = stored_dtype if stored_dtype is not None and stored_dtype.is_floating_point else merge.dtype
    if "whole" in change:
        return change["whole"].to(dtype)
    weight = _base_weight(assignment, merge)
    if "rows" in change:
        ids = change["ids"]
        table = weight.new_empty(max(len(weight), int(ids.max()) + 1), *weight.shape[1:], dtype=dtype)
        table[: len(weight)] = weight
        table[ids] = change["rows"].to(dtype)
        return table
    if "lora_A.weight" not in change:
        return weight if not weight.is_floating_point() or stored_dtype is None else weight.to(dtype)
    lora_a = change["lora_A.weight"].to(merge.device, torch.float32)
    lora_b = change["lora_B.weight"].to(merge.device, torch.float32)
    scaling, magnitude = change["scaling"].item(), change.get("lora_magnitude_vector")
    merged = torch.empty(weight.shape, dtype=dtype)
    step = max(1, VALUES_A_TIME // weight.shape[1])
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        values = weight[rows].to(merge.device, torch.float32).addmm(lora_b[rows], lora_a, alpha=scaling)
        if magnitude is not None:  # the norms of the rows, which DoRA trains apart (arXiv:2402.09353, equation 5)
            norms = torch.linalg.vector_norm(values, dim=1)
            values.mul_((magnitude[rows].to(merge.device) / norms).unsqueeze(1))
        merged[rows] = values.to(dtype)
    return merged


def _base_weight(assignment: Assignment, merge: Merge) -> Tensor:
    assert isinstance(assignment.stored, StoredTensor), assignment.name
    module = assignment.module
    if not merge.dequantized or not assignment.is_quantized:
        return read_tensor(assignment.stored)
    assert isinstance(module, QuantizedLayer)
    layer = QuantizedLinear(
        module.in_features, module.out_features, False, module.format, module.compute_dtype, merge.device
    )
    fill_from_files([replace(assignment, module=layer)], merge.device, merge.dtype)
    return layer.weight.detach().view(weight_shape(module)).cpu()


def quantized_if_wanted(key: str, value: Tensor, assignment: Assignment | None, merge: Merge) -> dict[str, Tensor]:
    """The tensor as it is, or bitsandbytes' codes and their state if it is the weight of a layer to be quantized."""
    is_linear = assignment is not None and assignment.is_quantized and takes_codes(assignment.module, merge)
    if merge.quantize is None or not is_linear:
        return {key: value}
    value = value.to(merge.device, merge.dtype)
    codes, absmax = Format(merge.quantize, storage=torch.uint8).quantize_rows(value)
    offset = absmax.mean()
    scales, nested = bnb.quantize_blockwise(absmax.flatten() - offset, blocksize=NESTED_BLOCKSIZE)
    book = code_book(merge.quantize, merge.device).clone()  # a copy, as safetensors refuses tensors that share memory
    state = bnb.QuantState(scales, value.shape, book, BLOCKSIZE, merge.quantize, value.dtype, offset, nested)
    parts = {f"{key}.{name}": part.cpu() for name, part in state.as_dict(packed=True).items()}
    return {key: codes.view(-1, 1).cpu()} | parts


def takes_codes(module: nn.Module, merge: Merge) -> bool:
    """Whether a quantized result has the layer as codes. Its rows must be whole blocks, and the head stays as it is."""
    head = merge.meta.model.get_output_embeddings()
    is_head = module is getattr(head, "base_layer", head)
    return isinstance(module, QuantizedLinear) and module.in_features % BLOCKSIZE == 0 and not is_head


def read_tensor(stored: StoredTensor) -> Tensor:
    """The whole tensor, on the CPU; one that is scaled by blocks in float32.

    Raises:
        CheckpointError: it has NaN or infinite values.
    """
    if isinstance(stored, ScaledTensor):
        values = torch.cat(list(read_dequantized(stored, torch.float32))).view(stored.shape)
    else:
        with safe_open(stored.file, "pt") as file:
            values = cast(Tensor, file.get_tensor(stored.key))
    check_finite(stored, values)
    return values
