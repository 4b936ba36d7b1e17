"""Merge an adapter into single weights of its base: which weights it changes, and what they become.

Weights may lie on the grid of the format in which they are written: those of a dequantized base do, and so does a base
that somebody dequantized before. What an adapter adds to them is far smaller than the distance to the next point of
that grid, so that rounding to the nearest point takes almost all of it away: of a real model's gain 3 to 10 % were
left. Rounded at random, with the probability that each of the two neighbours is near, the weights are right on average,
and 97 to 99 % of the gain are left. Other weights lie anywhere between the points and need nothing of it. Which of the
two a weight is, its first rows tell: whether rounding the base's own values changes them.

16 bits are such a grid too, on which the base's own weights lie. So sums are rounded to 16 bits at random as well, and
where they are quantized they are not rounded to 16 bits before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, TypeGuard, cast

import torch
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from safetensors import safe_open
from torch import Tensor, nn

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.config.adapter.adapter_config import (
    ADAPTER_WEIGHTS,
    PREFIX,
    TOKEN_ROWS,
    read_adapter_config,
    whole_keys,
)
from qlora_fsdp.inference.merge_formats import Grid, WeightFormat
from qlora_fsdp.inference.rounding import draw_uniform, round_to_16_bits
from qlora_fsdp.layers.experts.forward import ExpertLora
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.lora import GATE_UP, QKV, LoraEmbedding, LoraLinear
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.read_adapter import read_whole, tokens_of_rows
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.model.build import MetaModel
from qlora_fsdp.weights.composed import Assignment, ComposedTensor, Stored, StoredRows
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.row_reader import check_finite
from qlora_fsdp.weights.safetensors_files import StoredTensor
from qlora_fsdp.weights.scaled import ScaledTensor, name_of, read_dequantized
from qlora_fsdp.weights.stored_quantization import weight_shape

VALUES_A_TIME = 2**22  # of a weight, in float32: 16 MiB, which the allocator reuses; larger blocks need new pages
NUM_KEPT = 3  # weights: an expert has up to three matrices in the files
NUM_SAMPLED = 16  # rows of a weight that tell whether it lies on a grid
SHORT_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Merge:
    """A merge of an adapter into its base, and how it is done.

    Attributes:
        trained: the base with the adapter's layers, on meta.
        adapter: folder of the adapter.
        out: folder of the result.
        dequantized: merge into the quantized weights that the adapter was trained on, not the full-precision ones.
        format: in which the linear layers are written; None: as the base has them.
        device: where weights are quantized and adapters are multiplied.
    """

    trained: AssembledModel
    adapter: Path
    out: Path
    dequantized: bool
    format: WeightFormat | None
    device: torch.device

    @property
    def meta(self) -> MetaModel:
        """The base on meta, and what fills it."""
        return self.trained.meta

    @property
    def rounding(self) -> Literal["nearest", "random"]:
        """How changed weights are rounded to the format of the result."""
        return "random" if self.format is not None or self.rounds_16_bits else "nearest"

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

    @property
    def num_weights(self) -> int:
        """How many weights they are."""
        if isinstance(self.assignment.stored, ComposedTensor):
            return self.piece.num_rows * self.assignment.stored.row_elements
        return self.assignment.num_elements


def written_dtype(stored: Stored, merge: Merge) -> torch.dtype:
    """The dtype in which a weight that has no codes is written; one that is scaled by blocks as others are."""
    is_plain = stored.dtype.is_floating_point and not isinstance(stored, ScaledTensor)
    return stored.dtype if is_plain else merge.dtype


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


class _Joined(NamedTuple):
    """Layers that a server may join, whose weights then share nvfp4's scale of the whole.

    Attributes:
        parent: the name of the module that has them.
        names: theirs in it, where they are known.
        in_features: of each.
    """

    parent: str
    names: tuple[str, ...]
    in_features: int


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
        self._largest = lru_cache(NUM_KEPT)(self._find_largest)
        self._assignments = {assignment.name: assignment for assignment in merge.meta.assignments}
        self.on_grid: dict[str, bool] = {}  # by the names of weights that get codes
        self.rounds_at_random = False  # whether codes of some changed weight were rounded so

    def merged_weight(self, assignment: Assignment) -> Tensor:
        """A weight for which the files have one tensor, or none, with the adapter merged into it; on the CPU."""
        change = self.changes.get(assignment.name)
        stored = assignment.stored
        dtype = self.merge.dtype if stored is None else written_dtype(stored, self.merge)
        if change is not None and "whole" in change.keys:
            return change.read_whole().to(dtype)
        assert isinstance(stored, StoredTensor), assignment.name
        if self._is_dequantized(assignment):
            weight = torch.empty(weight_shape(assignment.layer), dtype=dtype)
        else:
            weight = _read_tensor(stored)
            if change is None:
                return weight.to(dtype) if weight.is_floating_point() else weight
            if "rows" in change.keys:
                weight = _with_rows(weight, change, dtype)
                if "lora_A.weight" not in change.keys:
                    return weight
        matrix = weight.view(-1, weight.shape[-1])
        self._merge_rows(assignment, 0, matrix)
        if isinstance(assignment.module, QuantizedExpertWeight) and assignment.module.is_turned:
            weight = weight.mT.contiguous()  # as transformers' class has it
        return weight.to(dtype)

    def merged_pieces(self, stored: StoredTensor, uses: Sequence[PieceUse]) -> Tensor:
        """A tensor of the files with the changes of all weights of which it is a part; on the CPU.

        One that is scaled by blocks becomes one as the model has it, of values in 16 bits.
        """
        is_turned = isinstance(stored, ScaledTensor) and stored.is_turned  # MXFP4, which is exact in 16 bits
        tensor = _read_tensor(stored, self.merge.dtype if is_turned else torch.float32)
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
            matrix = turned.reshape(-1, height).contiguous()
            self._merge_rows(assignment, first_row, matrix)
            turned.copy_(matrix.view(turned.shape))
        if is_turned:
            return tensor.mT.contiguous()
        return tensor.to(self.merge.dtype) if isinstance(stored, ScaledTensor) else tensor

    def codes(self, stored: StoredTensor, use: PieceUse) -> dict[str, Tensor]:
        """The tensors of the result for a tensor of the files that becomes codes (`find_codes`); on the CPU.

        In 16 bits a small change would be rounded away before it is quantized: of a real model, trained at a learning
        rate of 2e-4, 91.2 % of the gain were kept so, and 98.6 % in 32 bits.
        """
        merge = self.merge
        format = merge.format
        assert format is not None
        assignment = use.assignment
        scale_dtype = written_dtype(stored, self.merge)
        largest = None
        if format.has_whole_scale:
            largest = self._largest(_joined_by_servers(assignment))
        change = self.changes.get(assignment.name)
        is_merged = change is not None and "whole" not in change.keys
        pieces = []
        for start, base, values in self._merged_rows(assignment, use.first_row, self._read(stored, assignment)):
            if assignment.name not in self.on_grid:
                self.on_grid[assignment.name] = format.holds(base[:NUM_SAMPLED], scale_dtype, largest)
            is_on_grid = self.on_grid[assignment.name]
            drawn = None
            if is_merged and is_on_grid:
                first = start * values.shape[1]
                drawn = draw_uniform(assignment.name, first, values.numel()).to(values.device).view_as(values)
                self.rounds_at_random = True
            if not is_merged:
                values = values.to(merge.dtype)  # as training quantizes it
            grid = Grid(base, drawn) if is_on_grid else None
            pieces.append(format.encode(values, scale_dtype, largest, grid))
        return format.join(name_of(stored), pieces, merge.dtype)

    def _read(self, stored: StoredTensor, assignment: Assignment) -> Tensor:
        """A tensor of the files as a matrix; where codes are dequantized instead, one of its shape without values."""
        if not self._is_dequantized(assignment):
            return _read_tensor(stored).view(-1, stored.shape[-1])
        if isinstance(assignment.stored, ComposedTensor):
            return torch.empty(stored.shape, device="meta")
        return torch.empty(assignment.layer.out_features, assignment.layer.in_features, device="meta")

    def _find_largest(self, joined: _Joined) -> Tensor:
        """The largest magnitude of the merged weights of layers that a server may join.

        A server joins layers that read the same input (queries, keys and values; gate and up), and then they have one
        scale of the whole: vLLM takes the largest of those that it finds, with which the codes of the others are wrong.
        """
        found = []
        for assignment in self.merge.meta.assignments:
            is_of_linear = assignment.is_quantized and takes_codes(assignment.module, self.merge)
            if not is_of_linear or _joined_by_servers(assignment) != joined:
                continue
            assert isinstance(assignment.stored, StoredTensor)  # others were refused
            matrix = self._read(assignment.stored, assignment)
            found += [values.abs().amax() for _, _, values in self._merged_rows(assignment, 0, matrix)]
        return torch.stack(found).amax()

    def _merge_rows(self, assignment: Assignment, first_row: int, rows: Tensor) -> None:
        """Merge the adapter into consecutive rows of a weight, in place.

        Args:
            assignment: the weight, whose rows are counted over all experts.
            first_row: the number of the first.
            rows: [n, columns], as in the files; they are written only where the base is dequantized.
        """
        change = self.changes.get(assignment.name)
        is_sum = change is not None and "whole" not in change.keys
        for start, _, values in self._merged_rows(assignment, first_row, rows):
            target = rows[start - first_row : start - first_row + len(values)]
            if is_sum and target.dtype in SHORT_DTYPES:
                values = round_to_16_bits(values, target.dtype, assignment.name, start * rows.shape[1])
            target.copy_(values)

    def _merged_rows(
        self, assignment: Assignment, first_row: int, rows: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Merge the adapter into consecutive rows of a weight, a few megabytes at a time.

        Args:
            assignment: the weight, whose rows are counted over all experts.
            first_row: the number of the first.
            rows: [n, columns], as in the files; of a dequantized base only the shape counts.

        Yields:
            The number of the first of some rows; these of the base; and with the change; float32 [n, columns].
        """
        device = self.merge.device
        change = self.changes.get(assignment.name)
        codes = self._codes(assignment.name) if self._is_dequantized(assignment) else None
        start = first_row
        end = first_row + len(rows)
        num_expert_rows = end
        magnitude: Tensor | None = None
        whole: Tensor | None = None
        if change is not None and "whole" in change.keys:
            whole = change.read_whole()
            whole = whole.view(-1, whole.shape[-1])
        elif change is not None:
            left, right = self._factors(change)
            num_expert_rows = left.shape[1]
            if "lora_magnitude_vector" in change.keys:
                magnitude = change.read("lora_magnitude_vector").to(device)
        while start < end:  # up to the end of an expert
            expert, row = divmod(start, num_expert_rows)
            stop = min(end, start + num_expert_rows - row, start + max(1, VALUES_A_TIME // rows.shape[1]))
            if whole is not None:
                base = whole[start:stop].to(device, torch.float32)
            elif codes is not None:
                base = _dequantize(codes, start, stop)
            else:
                base = rows[start - first_row : stop - first_row].to(device, torch.float32)
            values = base
            if change is not None and whole is None:
                low = left[expert, row : row + stop - start]
                values = base.addmm(low, right[expert], alpha=change.scaling)
            if magnitude is not None:  # the norms of the rows, which DoRA trains apart (arXiv:2402.09353, equation 5)
                norms = torch.linalg.vector_norm(values, dim=1)
                values = values * (magnitude[start:stop] / norms).unsqueeze(1)
            yield start, base, values
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


def _joined_by_servers(assignment: Assignment) -> _Joined:
    """What is the same of all layers that a server may join with a weight's.

    Queries, keys and values are joined, and so are gate and up. Of layers with other names, those of one module may be
    that read as many inputs.
    """
    parent, _, layer = assignment.name.removesuffix(".weight").rpartition(".")
    names = next((each for each in (QKV, GATE_UP) if layer in each), ())
    return _Joined(parent, names, assignment.layer.in_features)


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


def takes_codes(module: nn.Module, merge: Merge) -> bool:
    """Whether a quantized result has the layer as codes. Its rows must be whole groups, and the head stays as it is.

    So do layers of a class of the model's own (Falcon's), for which transformers loads no codes.
    """
    return is_quantizable(module, merge) and merge.format is not None and merge.format.fits(module.in_features)


def is_quantizable(module: nn.Module, merge: Merge) -> TypeGuard[QuantizedLinear]:
    """Whether a quantized result could have the layer as codes, if only its rows were whole groups."""
    head = merge.meta.model.get_output_embeddings()
    if not isinstance(module, QuantizedLinear) or module is getattr(head, "base_layer", head):
        return False
    return module.replaces is nn.Linear


def find_codes(merge: Merge) -> dict[str, PieceUse]:
    """Which tensors of the files become codes, by their keys, and what of the model each is.

    Matrices of experts do so where the files have one for each and the model has them as they are.
    """
    found: dict[str, PieceUse] = {}
    if merge.format is None:
        return found
    for assignment in merge.meta.assignments:
        stored = assignment.stored
        if isinstance(stored, StoredTensor) and assignment.is_quantized and takes_codes(assignment.module, merge):
            num_rows = assignment.layer.out_features
            found[stored.key] = PieceUse(assignment, StoredRows(stored, 0, num_rows), 0)
    if not merge.format.has_experts:
        return found
    for key, uses in find_uses(merge.meta.assignments).items():
        assignment, piece, _ = uses[0]
        composed = assignment.stored
        assert isinstance(composed, ComposedTensor)
        is_whole = len(uses) == 1 and len(piece.stored.shape) == 2 and piece.num_rows == piece.stored.shape[0]
        is_of_experts = isinstance(assignment.module, QuantizedExpertWeight) and not composed.is_transposed
        is_weight = name_of(piece.stored).endswith(".weight")
        if is_weight and is_whole and is_of_experts and merge.format.fits(composed.row_elements):
            found[key] = uses[0]
    return found


def _read_tensor(stored: StoredTensor, dtype_of_scaled: torch.dtype = torch.float32) -> Tensor:
    """The whole tensor, on the CPU; one that is scaled by blocks in a dtype of choice.

    Raises:
        CheckpointError: it has NaN or infinite values.
    """
    if isinstance(stored, ScaledTensor):
        values = torch.empty(stored.shape, dtype=dtype_of_scaled)
        rows = values.view(-1, stored.shape[-1])
        start = 0
        for some in read_dequantized(stored, dtype_of_scaled):
            rows[start : start + len(some)] = some
            start += len(some)
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
