"""Merge an adapter into single weights of its base: which weights it changes, and what they become.

Weights that were dequantized lie on the grid of their format. What an adapter adds to them is far smaller than the
distance to the next point of that grid, so that rounding to the nearest point takes almost all of it away: of a real
model's gain 3 to 10 % were left. Rounded at random, with the probability that each of the two neighbours is near, the
weights are right on average, and 97 to 99 % of the gain are left. Weights in full precision need nothing of it, because
they lie anywhere between the points.

16 bits are such a grid too, on which the base's own weights lie. So sums are rounded to 16 bits at random as well, and
where they are quantized they are not rounded to 16 bits before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, cast

import bitsandbytes.functional as bnb
import numpy as np
import torch
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from safetensors import safe_open
from torch import Tensor, nn

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.sizes import BLOCKSIZE, NESTED_BLOCKSIZE
from qlora_fsdp.config.adapter.adapter_config import (
    ADAPTER_WEIGHTS,
    PREFIX,
    TOKEN_ROWS,
    read_adapter_config,
    whole_keys,
)
from qlora_fsdp.layers import Format, QuantizedLinear
from qlora_fsdp.layers.experts.forward import ExpertLora
from qlora_fsdp.layers.lora import LoraEmbedding, LoraLinear
from qlora_fsdp.layers.quantized.format import code_book
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.read_adapter import read_whole, tokens_of_rows
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.build import MetaModel
from qlora_fsdp.weights.composed import Assignment, ComposedTensor, StoredRows
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.row_reader import check_finite
from qlora_fsdp.weights.safetensors_files import StoredTensor
from qlora_fsdp.weights.scaled import ScaledTensor, read_dequantized
from qlora_fsdp.weights.stored_quantization import weight_shape

VALUES_A_TIME = 2**22  # of a weight, in float32: 16 MiB, which the allocator reuses; larger blocks need new pages
NUM_KEPT = 3  # weights: an expert has up to three matrices in the files


SEED = 0
SHORT_DTYPES = (torch.bfloat16, torch.float16)
NUMBERS_A_STEP = 8  # float32 numbers that one step of Philox's counter gives


@dataclass(frozen=True)
class Merge:
    """A merge of an adapter into its base, and how it is done.

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
    def rounding(self) -> Literal["nearest", "random"]:
        """How changed weights are rounded to the format of the result."""
        is_random = self.rounds_codes or self.rounds_16_bits
        return "random" if is_random else "nearest"

    @property
    def rounds_codes(self) -> bool:
        """Whether weights of the dequantized base are rounded at random to the grid on which they lie."""
        return any(is_rounded_at_random(assignment, self) for assignment in self.meta.assignments)

    @property
    def rounds_16_bits(self) -> bool:
        """Whether the base's files, and so the result, have weights in 16 bits, to which sums are rounded at random."""
        return any(tensor.dtype in SHORT_DTYPES for tensor in self.trained.files.tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the base is quantized, as in training."""
        return self.trained.dtype


class PieceUse(NamedTuple):
    """Rows of a tensor of the files that are rows of a weight of the model.

    Attributes:
        assignment: the weight, whose `stored` is composed.
        piece: the rows in the files.
        first_row: the weight's row that is the first of them, counted over all experts.
    """

    assignment: Assignment
    piece: StoredRows
    first_row: int


def find_uses(assignments: Sequence[Assignment]) -> dict[str, list[PieceUse]]:
    """What becomes of the tensors that the model has in other tensors than the files, by their keys in the files."""
    uses: dict[str, list[PieceUse]] = {}
    for assignment in assignments:
        composed = assignment.stored
        if not isinstance(composed, ComposedTensor):
            continue
        start = 0
        for piece in composed.pieces:
            uses.setdefault(piece.stored.key, []).append(PieceUse(assignment, piece, start))
            num_elements = piece.num_rows * composed.row_elements
            start += num_elements // (composed.shape[-1] if composed.row_elements > 1 else 1)
    return uses


class WeightMerger:
    """Merges the adapter into one tensor of the files after another.

    Experts are many small tensors there, each of which takes a part of the same matrices and the same codes. So the
    last few of these are kept.
    """

    def __init__(self, merge: Merge, changes: Mapping[str, ParameterChange]) -> None:
        self.merge = merge
        self.changes = changes
        self._factors = lru_cache(NUM_KEPT)(self._read_factors)
        self._codes = lru_cache(NUM_KEPT)(self._quantize)
        self._assignments = {assignment.name: assignment for assignment in merge.meta.assignments}

    def merged_weight(self, assignment: Assignment) -> Tensor:
        """A weight for which the files have one tensor, or none, with the adapter merged into it; on the CPU."""
        change = self.changes.get(assignment.name)
        stored = assignment.stored
        stored_dtype = None if stored is None else stored.dtype
        if isinstance(stored, ScaledTensor):  # written like the layers that are not
            stored_dtype = self.merge.dtype
        dtype = stored_dtype if stored_dtype is not None and stored_dtype.is_floating_point else self.merge.dtype
        if change is not None and "whole" in change.keys:
            return change.read_whole().to(dtype)
        if change is not None and self.merge.quantize is not None and takes_codes(assignment.module, self.merge):
            # In 16 bits a small change would be rounded away before it is quantized: of a real model, trained at a
            # learning rate of 2e-4, 91.2 % of the gain were kept so, and 98.6 % in 32 bits.
            dtype = torch.float32
        assert isinstance(stored, StoredTensor), assignment.name
        if self._is_dequantized(assignment):
            weight = torch.empty(weight_shape(assignment.layer), dtype=dtype)
        else:
            weight = _read_tensor(stored)
            if change is None:
                return weight if stored_dtype == stored.dtype else weight.to(dtype)
            weight = weight.to(dtype) if dtype == torch.float32 else weight
            if "rows" in change.keys:
                weight = _with_rows(weight, change, dtype)
                if "lora_A.weight" not in change.keys:
                    return weight
        matrix = weight.view(-1, weight.shape[-1])
        self._merge_rows(assignment, 0, matrix)
        return weight.to(dtype)

    def merged_pieces(self, stored: StoredTensor, uses: Sequence[PieceUse]) -> Tensor:
        """A tensor of the files with the changes of all weights of which it is a part; on the CPU."""
        tensor = _read_tensor(stored)
        for assignment, piece, first_row in uses:
            if assignment.name not in self.changes and not self._is_dequantized(assignment):
                continue
            composed = assignment.stored
            assert isinstance(composed, ComposedTensor)
            rows = tensor.view(-1, composed.row_elements)[piece.first_row : piece.first_row + piece.num_rows]
            if not composed.is_transposed:
                self._merge_rows(assignment, first_row, rows)
                continue
            height = composed.shape[-1]  # whole matrices [height, row_elements], of which the model has the transposes
            turned = rows.view(-1, height, composed.row_elements).mT
            matrix = turned.reshape(-1, height)
            self._merge_rows(assignment, first_row, matrix)
            turned.copy_(matrix.view(turned.shape))
        return tensor

    def _merge_rows(self, assignment: Assignment, first_row: int, rows: Tensor) -> None:
        """Merge the adapter into consecutive rows of a weight, in place; a few megabytes at a time.

        Args:
            assignment: the weight, whose rows are counted over all experts.
            first_row: the number of the first.
            rows: [n, columns], as in the files; they are written only where the base is dequantized.
        """
        device = self.merge.device
        change = self.changes.get(assignment.name)
        if change is not None and "whole" in change.keys:
            whole = change.read_whole()
            rows.copy_(whole.view(-1, whole.shape[-1])[first_row : first_row + len(rows)])
            return
        codes = self._codes(assignment.name) if self._is_dequantized(assignment) else None
        start = first_row
        end = first_row + len(rows)
        num_expert_rows = end
        magnitude: Tensor | None = None
        if change is not None:
            left, right = self._factors(change)
            num_expert_rows = left.shape[1]
            if "lora_magnitude_vector" in change.keys:
                magnitude = change.read("lora_magnitude_vector").to(device)
        while start < end:  # up to the end of an expert
            expert, row = divmod(start, num_expert_rows)
            stop = min(end, start + num_expert_rows - row, start + max(1, VALUES_A_TIME // rows.shape[1]))
            target = rows[start - first_row : stop - first_row]
            values = target.to(device, torch.float32) if codes is None else _dequantize(codes, start, stop)
            if change is not None:
                low = left[expert, row : row + stop - start]
                values = values.addmm(low, right[expert], alpha=change.scaling)
            if magnitude is not None:  # the norms of the rows, which DoRA trains apart (arXiv:2402.09353, equation 5)
                norms = torch.linalg.vector_norm(values, dim=1)
                values.mul_((magnitude[start:stop] / norms).unsqueeze(1))
            if change is not None and is_rounded_at_random(assignment, self.merge):
                quant_type = assignment.layer.format.quant_type
                values = round_at_random(values, quant_type, assignment.name, start * rows.shape[1])
            if change is not None and target.dtype in SHORT_DTYPES:
                values = round_to_16_bits(values, target.dtype, assignment.name, start * rows.shape[1])
            target.copy_(values)
            start = stop

    def _is_dequantized(self, assignment: Assignment) -> bool:
        """Whether the adapter is merged into what the codes of a weight stand for."""
        return self.merge.dequantized and assignment.is_quantized

    def _read_factors(self, change: ParameterChange) -> tuple[Tensor, Tensor]:
        """The factors of a change, on the device."""
        left, right = change.factors()
        return left.to(self.merge.device), right.to(self.merge.device)

    def _quantize(self, name: str) -> QuantizedLinear:
        """A weight of the base as training had it, as one matrix of the rows of all experts."""
        merge = self.merge
        assignment = self._assignments[name]
        module = assignment.layer
        layer = QuantizedLinear(
            module.in_features, module.out_features, False, module.format, module.compute_dtype, merge.device
        )
        fill_from_files([replace(assignment, module=layer)], merge.device, merge.dtype)
        return layer


def is_rounded_at_random(assignment: Assignment, merge: Merge) -> bool:
    """Whether a weight that the adapter changes lies on the grid of the format in which it is written."""
    if not (merge.dequantized and assignment.is_quantized and takes_codes(assignment.module, merge)):
        return False
    stored_as = assignment.layer.format
    return stored_as.quant_type == merge.quantize and stored_as.blocksize == BLOCKSIZE


def _dequantize(layer: QuantizedLinear, start: int, stop: int) -> Tensor:
    """The rows [start, stop) of a weight in float32, which the compute dtype has rounded as in training."""
    values = torch.empty(1, stop - start, layer.in_features, dtype=layer.compute_dtype, device=layer.codes.device)
    parts = dict(zip(layer.part_names, layer.parts(), strict=True))
    layer.format.dequantize_part(parts, values, start)
    return values[0].float()


def _with_rows(weight: Tensor, change: ParameterChange, dtype: torch.dtype) -> Tensor:
    """A table with the rows of new tokens, which may be longer than it was."""
    ids = torch.tensor(change.token_ids)
    table = weight.new_empty(max(len(weight), int(ids.max()) + 1), *weight.shape[1:], dtype=dtype)
    table[: len(weight)] = weight
    table[ids] = change.read("rows").to(dtype)
    return table


def quantized_if_wanted(key: str, value: Tensor, assignment: Assignment | None, merge: Merge) -> dict[str, Tensor]:
    """The tensor as it is, or bitsandbytes' codes and their state if it is the weight of a layer to be quantized."""
    is_linear = assignment is not None and assignment.is_quantized and takes_codes(assignment.module, merge)
    if merge.quantize is None or not is_linear:
        return {key: value}
    is_changed = value.dtype == torch.float32  # and not rounded yet
    value = value.to(merge.device, torch.float32 if is_changed else merge.dtype)
    codes, absmax = Format(merge.quantize, storage=torch.uint8).quantize_rows(value)
    offset = absmax.mean()
    scales, nested = bnb.quantize_blockwise(absmax.flatten() - offset, blocksize=NESTED_BLOCKSIZE)
    book = code_book(merge.quantize, merge.device).clone()  # a copy, as safetensors refuses tensors that share memory
    state = bnb.QuantState(scales, value.shape, book, BLOCKSIZE, merge.quantize, merge.dtype, offset, nested)
    parts = {f"{key}.{name}": part.cpu() for name, part in state.as_dict(packed=True).items()}
    return {key: codes.view(-1, 1).cpu()} | parts


def takes_codes(module: nn.Module, merge: Merge) -> bool:
    """Whether a quantized result has the layer as codes. Its rows must be whole blocks, and the head stays as it is.

    So do layers of a class of the model's own (Falcon's), for which transformers loads no codes.
    """
    head = merge.meta.model.get_output_embeddings()
    if not isinstance(module, QuantizedLinear) or module is getattr(head, "base_layer", head):
        return False
    return module.replaces is nn.Linear and module.in_features % BLOCKSIZE == 0


def _read_tensor(stored: StoredTensor) -> Tensor:
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


@dataclass(frozen=True, eq=False)
class ParameterChange:
    """The change that an adapter makes to a parameter of the base. Tied parameters share one.

    Attributes:
        file: the adapter's tensors.
        keys: what is read there, by what it is: LoRA's matrices (`lora_A.weight`, `lora_B.weight`) and DoRA's
            magnitudes (`lora_magnitude_vector`); `whole` for a parameter that was trained in full; or `rows` of new
            tokens, which go into the `whole` if there is one too.
        scaling: of LoRA's product.
        num_experts: experts whose weights are the parameter, [E, rows, columns], each with matrices of its own; 1 for
            a linear layer.
        is_transposed: an expert's rows are its inputs, not its outputs, and so are those of embeddings.
        token_ids: the tokens that the `rows` belong to, in the order of these.
    """

    file: Path
    keys: Mapping[str, str]
    scaling: float = 1.0
    num_experts: int = 1
    is_transposed: bool = False
    token_ids: Sequence[int] = ()

    @property
    def is_of_embeddings(self) -> bool:
        """Whether it is LoRA on embeddings."""
        return self.is_transposed and self.num_experts == 1

    def read(self, what: str) -> Tensor:
        """A tensor of the adapter, on the CPU."""
        with safe_open(self.file, "pt") as file:
            return cast(Tensor, file.get_tensor(self.keys[what]))

    def read_whole(self) -> Tensor:
        """The parameter that was trained in full, on the CPU; rows that the adapter has apart are put into it."""
        with safe_open(self.file, "pt") as file:
            return read_whole(file, self.keys, self.token_ids)

    def factors(self) -> tuple[Tensor, Tensor]:
        """[E, rows, R] and [E, R, columns], whose product times `scaling` is added to the parameter; float32."""
        a, b = (self.read(f"lora_{letter}.weight").float() for letter in "AB")
        a_ERI = a.view(self.num_experts, -1, a.shape[1])  # PEFT stores A expert by expert, and B rank by rank
        b_EOR = b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1)
        return (a_ERI.mT, b_EOR.mT) if self.is_transposed else (b_EOR, a_ERI)


def find_parameter_changes(model: nn.Module, adapter: Path) -> dict[str, ParameterChange]:
    """Find an adapter's changes, by the name of the parameter that each changes.

    Two tied tables that are the same in the adapter share one.

    Args:
        model: the base with the adapter's layers; may be on meta.
        adapter: PEFT's folder, which fits the model.
    """
    changes: dict[str, ParameterChange] = {}
    token_rows: dict[nn.Module, ParameterChange] = {}  # one entry for two tables that are tied
    file = adapter / ADAPTER_WEIGHTS
    tokens = read_adapter_config(adapter, "adapter").get("trainable_token_indices")
    with safe_open(file, "pt") as tensors:
        stored = {key.removeprefix(PREFIX): key for key in tensors.keys()}  # noqa: SIM118
    for name, module in model.named_modules():
        if isinstance(module, (LoraLinear, ExpertLora)):
            parts = {part: f"{name}.{part}" for part in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")}
            keys = {part: stored[key] for part, key in parts.items() if key in stored}
            change = ParameterChange(file, keys, module.scaling[ADAPTER])
            if isinstance(module, ExpertLora):
                experts = module.get_base_layer()
                key = module.parameter_name
                change = replace(change, num_experts=module.num_experts, is_transposed=bool(experts.is_transposed))
                changes[f"{name.replace('.base_layer', '')}.{key}"] = change
            else:
                changes[f"{name}.weight"] = change
        elif isinstance(module, LoraEmbedding):
            keys = {f"lora_{part}.weight": stored[f"{name}.lora_embedding_{part}"] for part in "AB"}
            change = ParameterChange(file, keys, module.scaling[ADAPTER], is_transposed=True)
            changes[f"{name}.weight"] = change
        elif isinstance(module, ModulesToSaveWrapper):
            for key, _ in module.original_module.named_parameters():
                keys = {part: stored[own] for part, own in whole_keys(stored, f"{name}.{key}").items()}
                ids = tokens_of_rows(tokens, keys["rows"]) if "rows" in keys else ()
                changes[f"{name}.{key}"] = ParameterChange(file, keys, token_ids=ids)
        elif isinstance(module, TrainableTokensWrapper):
            layer = module.token_adapter
            if layer.tied_adapter is None:
                key = stored[f"{name}.{TOKEN_ROWS}"]
                token_rows[layer] = ParameterChange(file, {"rows": key}, token_ids=tokens_of_rows(tokens, key))
            rows = token_rows[layer.tied_adapter or layer]
            weight = f"{name.removesuffix('.base_layer')}.weight"
            adapter_of_head = changes.get(weight)  # a tied head may have an adapter above its rows
            if adapter_of_head is not None:
                rows = replace(adapter_of_head, keys={**adapter_of_head.keys, **rows.keys}, token_ids=rows.token_ids)
            changes[weight] = rows
    for one, other in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if one in changes and other in changes and _are_equal(changes[one], changes[other]):
            changes[one] = changes[other]
    return changes


def check_shared_layers(model: nn.Module, changes: Mapping[str, ParameterChange]) -> None:
    """Refuse to merge into a weight that several layers share, as blocks of Zamba 2 do: each has an adapter of its own.

    Raises:
        AdapterError: naming two such layers.
    """
    modules = dict(model.named_modules())
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        layers = [modules.get(name.removesuffix(".weight")) for name in pair]
        changed = [name for name in pair if name in changes]
        if changed and all(isinstance(layer, (LoraLinear, nn.Linear)) for layer in layers):
            raise AdapterError(
                f"{changed[0]} can't be merged: {' and '.join(sorted(pair))} are one weight, and adapters change the "
                "two layers apart. Use the adapter as it is, with qlora-fsdp generate or PEFT."
            )


def _are_equal(one: ParameterChange, other: ParameterChange) -> bool:
    """Whether an adapter has two tied tables as a whole, and both are the same: they can stay tied."""
    are_whole = "whole" in one.keys and "whole" in other.keys
    return are_whole and torch.equal(one.read_whole(), other.read_whole())


def round_at_random(values: Tensor, quant_type: str, name: str, first_element: int) -> Tensor:
    """Move each value of a weight to one of the two points of its block's grid between which it lies.

    The random numbers belong to the weight's name and to the place of a value in it. So a weight can be rounded in
    pieces of any size, and a merge that was cut off goes on with the same numbers.

    Args:
        values: float32 [rows, columns], consecutive whole rows of a weight; columns are a multiple of the block size.
        quant_type: nf4 or fp4, the format in which the weight is written.
        name: the weight's name.
        first_element: how many elements of the weight are before these.

    Returns:
        Values of the same shape. bitsandbytes' `quantize_4bit`, which rounds to the nearest, gives the codes of the
        points that were chosen.
    """
    points = code_book(quant_type, values.device).unique()  # ascending; fp4's book has zero twice
    blocks = values.reshape(-1, BLOCKSIZE)
    absmax = blocks.abs().amax(1, keepdim=True)
    scaled = blocks / absmax.clamp_min(torch.finfo(torch.float32).tiny)
    upper = torch.bucketize(scaled, points).clamp(1, len(points) - 1)
    lower = upper - 1
    share = (scaled - points[lower]) / (points[upper] - points[lower])
    drawn = _draw(name, first_element, values.numel()).to(values.device).view_as(share)
    chosen = torch.where(drawn < share, upper, lower)
    rounded: Tensor = points[chosen] * absmax
    return rounded.view(values.shape)


def round_to_16_bits(values: Tensor, dtype: torch.dtype, name: str, first_element: int) -> Tensor:
    """Round each value of a weight to one of the two numbers of a 16-bit dtype between which it lies, at random.

    A base in 16 bits lies on these numbers, which are 0.4 % apart in bfloat16. Most of what a short training at a low
    learning rate adds is less than half of that, and rounding to the nearest would take it away.

    Args:
        values: float32 [rows, columns], consecutive whole rows of a weight.
        dtype: bfloat16 or float16.
        name: the weight's name, to which the random numbers belong.
        first_element: how many elements of the weight are before these.

    Returns:
        Values of the same shape, in `dtype`.
    """
    nearest = values.to(dtype)
    as_float = nearest.float()
    is_beyond = values.abs() > as_float.abs()  # the other one is further from zero: one more in the bits
    bits = nearest.view(torch.int16)
    other = (bits + torch.where(is_beyond, 1, -1).to(torch.int16)).view(dtype)
    gap = (other.float() - as_float).abs()
    share = (values - as_float).abs() / gap
    drawn = _draw(name, first_element, values.numel()).to(values.device).view_as(values)
    is_moved = (drawn < share) & (as_float != 0) & gap.isfinite()
    return torch.where(is_moved, other, nearest)


def _draw(name: str, first: int, count: int) -> Tensor:
    """Numbers in [0, 1) of a weight, from the given one on: float32 [count]."""
    key = hashlib.sha256(f"{SEED} {name}".encode()).digest()
    bits = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    bits.advance(first // NUMBERS_A_STEP)
    skipped = first % NUMBERS_A_STEP
    numbers = np.random.Generator(bits).random(skipped + count, dtype=np.float32)
    return torch.from_numpy(numbers[skipped:])
