"""Tiny mixture-of-experts models: their files as the hub has them, and what bitsandbytes makes of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bitsandbytes.functional as bnb
import torch
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.config.schema import FsdpConfig, ModelConfig, QuantConfig, QuantType4bit
from qlora_fsdp.config.specs import ShardSpec
from qlora_fsdp.layers.experts.grouped_products import QuantizedExpertWeight
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized_layer import QuantizedLayer
from qlora_fsdp.model.build import BuildSettings, MetaModel, build_model
from qlora_fsdp.model.find import find_model
from qlora_fsdp.runtime.processes import Processes
from qlora_fsdp.sharding.prove import prove_shards
from qlora_fsdp.sharding.shard import place_model, shard_model
from qlora_fsdp.weights import row_reader
from qlora_fsdp.weights.composed import Assignment
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.stored_quantization import weight_name
from tests.helpers.checkpoints import SHAPE

# No number of ranks divides the rows of 5 experts; 12 are not in the order of the alphabet.
EXPERTS: dict[str, dict[str, object]] = {
    "qwen3_moe": {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 1,
        "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    },
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16},
    "llama4_text": {
        "num_local_experts": 5, "num_experts_per_tok": 1, "intermediate_size_mlp": 128, "head_dim": 16,
    },
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip
FORMATS = {
    "nf4": QuantConfig(bnb_4bit_use_double_quant=False),
    "nf4 double": QuantConfig(),
    "fp4": QuantConfig(bnb_4bit_quant_type=QuantType4bit.fp4, bnb_4bit_use_double_quant=False),
    "int8": QuantConfig(load_in_4bit=False, load_in_8bit=True),
    "none": QuantConfig(load_in_4bit=False),
}
Parts = dict[str, Tensor]  # by the name of a weight's part, or of a parameter


def make_experts(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Path:
    """Write a random model in the original layout of its family, in several files."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **EXPERTS[family]}, initializer_range=0.1)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, **{"max_shard_size": "100KB", **more})
    return folder


def build(folder: Path, quant: QuantConfig, dtype: torch.dtype = torch.bfloat16) -> MetaModel:
    files = find_model(ModelConfig(path=str(folder)), is_main=True, first_error=lambda error: error)
    return build_model(files, BuildSettings(quant, dtype, "eager"))


class Whole(nn.Module):
    """A base model without adapters, in the place of a task's model."""

    transform = None
    embeddings = head = nn.Identity()  # neither is a unit of its own
    per_layer_tables: tuple[nn.Embedding, ...] = ()

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    def layers(self) -> nn.ModuleList:
        return next(m.layers for m in self.model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList))


def load(meta: MetaModel, assignments: list[Assignment], processes: Processes, piece_bytes: int = PIECE_BYTES) -> Parts:
    """Shard, fill and prove a model as a run does; what FSDP gathers, by name. Codes and scales come as bytes."""
    model = Whole(meta.model)
    units = shard_model(model, ShardSpec.of(FsdpConfig(), processes.num_ranks, processes.local_num_ranks), processes)
    place_model(model, processes.device, processes.device)
    row_reader.PIECE_BYTES = piece_bytes
    try:
        fill_from_files(assignments, processes.device, torch.bfloat16)
    finally:
        row_reader.PIECE_BYTES = PIECE_BYTES
    prove_shards(model, units, processes, processes.num_ranks)
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        unit.unshard()
    found = dict(meta.model.named_parameters())
    for name, layer in meta.model.named_modules():
        if isinstance(layer, QuantizedLayer):
            for part in layer.part_names:
                found[f"{weight_name(name, layer)}.{part}"] = as_bytes(found.pop(f"{name}.{part}"))
    return found


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8).view(len(tensor), -1)


def count_wrong(found: Parts, expected: Parts) -> dict[str, int]:
    """By name, the bytes (of what is not quantized: values) that differ. Our rows may end in padding."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    wrong = {}
    for name, tensor in expected.items():
        mine = found[name][:, : tensor.shape[1]] if tensor.dtype == torch.uint8 else found[name].to(tensor.dtype)
        wrong[name] = int((mine != tensor).sum())
    return wrong


def stock_parts(meta: MetaModel, stock: PreTrainedModel, format: Format | None) -> Parts:
    """What bitsandbytes makes of the weights that stock transformers has loaded, for the layers that are quantized."""
    parameters = dict(stock.named_parameters())
    for name, layer in meta.model.named_modules():
        if isinstance(layer, QuantizedLayer):
            weight = parameters.pop(weight_name(name, layer)).data
            assert format is not None
            quantized = _quantize(weight, format) if format.is_4bit else _quantize_int8(weight)
            parameters |= {f"{weight_name(name, layer)}.{part}": value for part, value in quantized.items()}
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _quantize(weight: Tensor, format: Format) -> Parts:
    """Codes and scales by bitsandbytes, rows first, as bytes."""
    module = nn.Module()
    module.weight = nn.Parameter(weight.clone(), requires_grad=False)
    replace_parameter_4bit(module, "weight", format.double_quant, format.quant_type, format.blocksize)
    state, num_rows = module.parametrizations.weight[0].quant_state, weight.numel() // weight.shape[-1]
    codes = module.parametrizations.weight.original
    parts = {"codes": codes.view(num_rows, -1), "scales": state.absmax.view(num_rows, -1)}
    if format.double_quant:
        parts["nested_scales"] = torch.cat([state.state2.absmax.flatten(), state.offset.view(1)])
    return {name: as_bytes(part) for name, part in parts.items()}


def _quantize_int8(weight: Tensor) -> Parts:
    codes, scales, _ = bnb.int8_vectorwise_quant(weight.view(-1, weight.shape[-1]).half())
    return {"codes": as_bytes(codes), "scales": as_bytes(scales)}


def num_quantized(meta: MetaModel) -> int:
    """How many weights of experts are quantized."""
    return sum(isinstance(module, QuantizedExpertWeight) for module in meta.model.modules())
