"""Adapters that start from what quantization has rounded away (`lora.init_lora_weights=loftq`).

LoftQ (arXiv:2310.08659) in the form of PEFT's `replace_lora_weights_loftq`: the quantized base stays as it is, and B A,
times the adapter's scaling, is the matrix of rank r that is nearest to W - Q(W). W is the weight as the files have it,
and Q(W) what the layer computes with. So the model starts nearer to the full one, and nothing has to be trained for it.

Both weights are there for a moment: while a weight is read, each rank holds its rows and has just quantized them. The
differences of all ranks are gathered to a whole matrix, of one weight at a time. To decompose it is more work than all
else in loading, so ranks take turns: each decomposes another weight, at the same time. A weight's adapter is computed
by one rank alone, from bits that do not depend on the number of ranks, so neither do the results.

PEFT leaves the scaling out of account, as if it were 1 (lora_alpha=r). Here it is divided out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from qlora_fsdp.common.errors import AdapterError
from qlora_fsdp.common.text import list_some
from qlora_fsdp.layers.experts.forward import ExpertLora
from qlora_fsdp.layers.lora import LoraEmbedding, LoraLinear
from qlora_fsdp.layers.quantized.linear import QuantizedLinear, own_parts
from qlora_fsdp.layers.token_rows import ADAPTER
from qlora_fsdp.model.adapters.initialize import draw_plain_start
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.runtime.rows import gather_rows, local_rows, local_tensor, shard_group
from qlora_fsdp.weights.composed import Assignment

_SET_TRUE = "Set lora.init_lora_weights=true"


def check_can_correct(model: peft.PeftModel, assignments: list[Assignment]) -> None:
    """Refuse adapters that can't start from the rounding's error.

    Args:
        model: on meta, with its adapters.
        assignments: what fills the base's parameters.

    Raises:
        AdapterError: the embeddings or experts have adapters, or the files have codes in place of weights.
    """
    start = "lora.init_lora_weights=loftq"
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, ExpertLora):
            raise AdapterError(
                f"{start} is for linear layers, and {name} has an adapter for each expert. {_SET_TRUE}, or "
                "lora.experts=false."
            )
        if isinstance(module, LoraEmbedding):
            raise AdapterError(
                f"{start} is for linear layers, and {name} is a table of embeddings. {_SET_TRUE}, or take it out of "
                "lora.target_modules."
            )
    adapted = _adapted_layers(model)
    of_codes = []
    for assignment in assignments:
        if assignment.module in adapted and (assignment.stored_parts or assignment.keeps_codes):
            of_codes.append(assignment.name)
    if of_codes:
        raise AdapterError(
            f"{start} starts from what is rounded here, and the model's files are quantized already: they have no full "
            f"weights. {_SET_TRUE}, or model.path to the model in full precision:\n{list_some(of_codes)}"
        )


class RoundingErrors:
    """Fills the adapters of quantized linear layers from what is rounded away, while the base is loaded.

    Args:
        model: PEFT's model, sharded or not.
        seed: of what can't be found so: where a weight's error has a lower rank than its adapter, as that of a weight
            which is on the grid of its format, the rest of the adapter starts as with `init_lora_weights=true`.
        processes: all ranks take part.

    Attributes:
        layers: the adapters that are filled here, by their base layers.
    """

    def __init__(self, model: peft.PeftModel, seed: int, processes: Processes) -> None:
        self.layers = _adapted_layers(model)
        self.seed = seed
        self.processes = processes
        self._names = {module: name for name, module in model.named_modules()}
        self._waiting: list[LoraLinear] = []  # whose errors have been gathered, one for each rank
        self._own_error: Tensor | None = None  # that of them which this rank decomposes

    def observers(self) -> dict[nn.Module, Callable[[Tensor], None]]:
        """What is to be called for each base layer once it is quantized, with this rank's rows of its weight."""
        return {layer: partial(self._take, layer) for layer in self.layers}

    @torch.no_grad()
    def _take(self, layer: QuantizedLinear, rows: Tensor) -> None:
        """Gather the error of a weight. Collective.

        Args:
            layer: has its codes and scales.
            rows: [n, in_features], this rank's rows as the files have them, on the device.
        """
        error = _error_of_rows(layer, rows)
        whole = gather_rows(error, layer.out_features, shard_group(layer.codes))
        if len(self._waiting) == self.processes.rank:
            self._own_error = whole
        self._waiting.append(self.layers[layer])
        if len(self._waiting) == self.processes.num_ranks:
            self.finish()

    @torch.no_grad()
    def finish(self) -> None:
        """Fill the adapters whose errors wait to be decomposed. Collective."""
        own: tuple[Tensor, Tensor] | None = None
        if self._own_error is not None:
            own = self._decompose(self._waiting[self.processes.rank], self._own_error)
            self._own_error = None
        for rank, module in enumerate(self._waiting):
            lora_a = cast(nn.Linear, module.lora_A[ADAPTER]).weight
            lora_b = cast(nn.Linear, module.lora_B[ADAPTER]).weight
            for place, weight in enumerate((lora_a, lora_b)):
                if rank == self.processes.rank:
                    assert own is not None
                    values = own[place].contiguous()
                else:
                    values = torch.empty(weight.shape, dtype=torch.float32, device=self.processes.device)
                if self.processes.num_ranks > 1:
                    dist.broadcast(values, rank)
                first, last = local_rows(weight)
                local_tensor(weight).copy_(values[first:last])
        self._waiting = []

    def _decompose(self, module: LoraLinear, error: Tensor) -> tuple[Tensor, Tensor]:
        shape_a = cast(nn.Linear, module.lora_A[ADAPTER]).weight.shape
        plain_a = draw_plain_start(shape_a, self.seed, self._names[module])
        return nearest_of_rank(error / module.scaling[ADAPTER], plain_a.to(error.device))


def nearest_of_rank(matrix: Tensor, plain_a: Tensor) -> tuple[Tensor, Tensor]:
    """The product B A of rank r that is nearest to a matrix, by the Eckart-Young theorem: its first r singular parts.

    Each factor gets the square root of the singular values, as in PEFT. Singular vectors come from the eigenvectors of
    the smaller of M Mᵀ and Mᵀ M, which takes a tenth of the time of a singular value decomposition on a GPU.

    Args:
        matrix: M, float32 [out, in].
        plain_a: [r, in], what A gets beyond the matrix's own rank. B is zero there.

    Returns:
        A, float32 [r, in], and B, float32 [out, r].
    """
    out_features, in_features = matrix.shape
    num_parts = min(len(plain_a), out_features, in_features)
    is_wide = in_features > out_features
    tall = matrix.mT if is_wide else matrix
    _, vectors = torch.linalg.eigh(tall.mT @ tall)  # by rising eigenvalues
    vectors = vectors[:, -num_parts:].flip(1)
    scaled = tall @ vectors
    sizes = torch.linalg.vector_norm(scaled, dim=0)
    # Eigenvectors of a product of the matrix with itself are known to the root of what its own would be known to.
    has_size = sizes > sizes.max() * torch.finfo(torch.float32).eps ** 0.5
    roots = sizes[has_size].sqrt()
    of_long_side = scaled[:, has_size] / roots
    of_short_side = vectors[:, has_size] * roots
    lora_a = plain_a.clone()
    lora_b = matrix.new_zeros(out_features, len(plain_a))
    num_found = len(roots)
    lora_a[:num_found] = of_long_side.mT if is_wide else of_short_side.mT
    lora_b[:, :num_found] = of_short_side if is_wide else of_long_side
    return lora_a, lora_b


def _adapted_layers(model: peft.PeftModel) -> dict[QuantizedLinear, LoraLinear]:
    """The adapters of quantized linear layers, by their base layers.

    A head in int8 (`quant.embeddings=int8`) is none of them. It is not in the base's format, and by far the largest
    weight: its adapter starts as with `init_lora_weights=true`.
    """
    found: dict[QuantizedLinear, LoraLinear] = {}
    base = model.get_base_model()
    head = base.get_output_embeddings() if isinstance(base, PreTrainedModel) else None
    for module in model.modules():
        if module is not head and isinstance(module, LoraLinear) and isinstance(module.base_layer, QuantizedLinear):
            found[module.base_layer] = module
    return found


def _error_of_rows(layer: QuantizedLinear, rows: Tensor) -> Tensor:
    """W - Q(W) of this rank's rows, float32 [n, in_features] on the device of `rows`. Collective.

    NaN and infinite values count as no error. They end the run once all files are read, by the names of their tensors.
    """
    format, parts = own_parts(layer)
    error = rows.float()
    if len(rows):
        on_device = {name: part.to(rows.device) for name, part in parts.items()}
        error = error - format.dequantize(on_device, len(rows), layer.in_features, layer.compute_dtype).float()
    return error.nan_to_num(0.0, 0.0, 0.0)
