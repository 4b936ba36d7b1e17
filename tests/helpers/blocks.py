"""A sharded stack of quantized layers in awkward shapes, loaded from files, and what bitsandbytes makes of the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from qlora_fsdp.common.sizes import PIECE_BYTES
from qlora_fsdp.config.schema import FsdpConfig
from qlora_fsdp.config.specs import ShardSpec
from qlora_fsdp.layers.quantized.format import Format
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.runtime import rows as sharded_rows
from qlora_fsdp.runtime.processes import Processes, start_processes, stop_processes
from qlora_fsdp.sharding.prove import prove_shards
from qlora_fsdp.sharding.shard import place_model, shard_model
from qlora_fsdp.weights.composed import Assignment
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.safetensors_files import INDEX_NAME, read_headers
from tests.helpers.compressed import package_parts
from tests.helpers.ranks import Meeting

# (out_features, in_features): rows that no number of ranks divides, fewer rows than ranks, groups of 256 scales that
# end in the middle of a row, rows of scales whose bytes do not fill an element of the storage.
SHAPES = [(130, 64), (3, 128), (1, 192), (96, 320), (257, 64)]
INT8_SHAPES = [*SHAPES, (9, 66)]
NUM_BLOCKS = 2

HAS_UINT8 = torch.__version__ >= "2.13"
STORAGES = [torch.bfloat16, torch.float32] + [torch.uint8] * HAS_UINT8
FORMATS = [
    Format(quant_type, double_quant, storage=storage)
    for quant_type, double_quant in (("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True), ("int8", False))
    for storage in STORAGES
]
FORMATS += [Format("int4", blocksize=32), Format("int4", scale_dtype=torch.float32)]  # groups of 32 and of 64
FORMATS += [
    Format("mxfp4", blocksize=32),
    Format("nvfp4", blocksize=16, scale_dtype=torch.float8_e4m3fn),
    Format("fp8"),
    Format("fp8", storage=torch.float32, scale_dtype=torch.float32),
]
CHECKPOINTS = list(itertools.product((torch.bfloat16, torch.float16, torch.float32), (1, 2)))  # dtype, number of files


class Blocks(nn.Module):
    """Blocks of quantized layers, every second with a bias, and a norm, in the place of a language model."""

    transform = None
    embeddings = head = nn.Identity()  # neither is a unit of its own
    per_layer_tables: tuple[nn.Embedding, ...] = ()

    def __init__(self, format: Format, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(NUM_BLOCKS):
            block = nn.Module()
            block.norm = nn.LayerNorm(5, dtype=dtype, device="meta")
            for index, (rows, columns) in enumerate(SHAPES if format.is_4bit else INT8_SHAPES):
                block.add_module(f"linear{index}", QuantizedLinear(columns, rows, index % 2 == 0, format, dtype))
            self.layers.append(block)
        self.requires_grad_(False)

    def linears(self) -> Iterator[tuple[str, QuantizedLinear]]:
        return ((name, m) for name, m in self.named_modules() if isinstance(m, QuantizedLinear))


def write_blocks(folder: Path, dtype: torch.dtype, num_files: int) -> None:
    """A checkpoint of `Blocks` in one file, or in several with an index."""
    torch.manual_seed(1)
    tensors = {}
    for block in range(NUM_BLOCKS):
        shapes: dict[str, tuple[int, ...]] = {"norm.weight": (5,), "norm.bias": (5,)}
        for index, (rows, columns) in enumerate(INT8_SHAPES):
            shapes[f"linear{index}.weight"] = (rows, columns)
            if index % 2 == 0:
                shapes[f"linear{index}.bias"] = (rows,)
        tensors |= {f"layers.{block}.{name}": torch.randn(shape).mul_(0.1).to(dtype) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {name: f"part{index % num_files}.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def load_blocks(
    folder: Path, format: Format, dtype: torch.dtype, cpu_offload: bool, processes: Processes
) -> tuple[Blocks, list[FSDPModule]]:
    """Shard and load, as a run does."""
    model = Blocks(format, dtype)
    stored = read_headers(folder)
    assignments = []
    for name, module in model.named_modules():
        for attribute in ("weight", "bias"):
            key = f"{name}.{attribute}"
            if key in stored and getattr(module, attribute) is not None:
                assignments.append(Assignment(key, module, attribute, stored[key]))
    settings = FsdpConfig(cpu_offload=cpu_offload)
    spec = ShardSpec.of(settings, processes.num_ranks, processes.local_num_ranks)
    units = shard_model(model, spec, processes)
    place_model(model, torch.device("cpu") if cpu_offload else processes.device, processes.device)
    fill_from_files(assignments, processes.device, dtype)
    return model, units


def count_wrong_bytes_everywhere(folder: Path, with_turns: bool = False) -> dict[str, dict[str, int]]:
    """`count_wrong_bytes` of every format on this rank; checkpoints and dtypes take turns.

    Args:
        folder: with the checkpoints.
        with_turns: let offload take turns too, so that each format is tried either with it or without.
    """
    Meeting.new_port()
    processes = start_processes(60)
    try:
        wrong = {}
        for index, (format, cpu_offload) in enumerate(itertools.product(FORMATS, (False, True))):
            is_its_turn = cpu_offload == bool(index // 4 % 2)
            if with_turns and not is_its_turn:
                continue
            stored_dtype, num_files = CHECKPOINTS[index % len(CHECKPOINTS)]
            dtype = (torch.float32, torch.bfloat16)[index // 2 % 2]
            source = folder / f"{stored_dtype}-{num_files}"
            case = f"{format} in {dtype} from {source.name}, cpu_offload={cpu_offload}"
            wrong[case] = count_wrong_bytes(source, format, dtype, cpu_offload, processes)
        return wrong
    finally:
        stop_processes()


def count_wrong_bytes(
    folder: Path, format: Format, dtype: torch.dtype, cpu_offload: bool, processes: Processes
) -> dict[str, int]:
    """By name, bytes (of full-precision parameters: elements) in which what FSDP gathers differs from bitsandbytes'."""
    model, units = load_blocks(folder, format, dtype, cpu_offload, processes)
    prove_shards(model, units, processes, processes.num_ranks)
    tensors = {
        name: t for file in folder.glob("*.safetensors") for name, t in load_file(file, str(processes.device)).items()
    }
    for unit in units:
        unit.unshard()
    wrong = {}
    for name, parameter in model.named_parameters():
        if name in tensors:
            wrong[name] = int((parameter.to(processes.device) != tensors[name].to(dtype)).sum())
    for name, layer in model.linears():
        for part, expected in stock_parts(tensors[f"{name}.weight"].to(dtype), format).items():
            found = getattr(layer, part).to(processes.device).contiguous().view(torch.uint8)
            if expected.ndim > 1:
                found = found[:, : expected.shape[1] * expected.dtype.itemsize]  # rows may end in padding
            wrong[f"{name}.{part}"] = int((found != expected.contiguous().view(torch.uint8)).sum())
    return wrong


def stock_parts(weight: Tensor, format: Format) -> dict[str, Tensor]:
    """Codes and scales of the whole weight by bitsandbytes' or compressed-tensors' own functions, rows first."""
    rows, columns = weight.shape
    if not format.is_bitsandbytes:
        return package_parts(weight, format)
    if not format.is_4bit:
        codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
        return {"codes": codes, "scales": scales}
    packed, state = bnb.quantize_4bit(
        weight, blocksize=64, compress_statistics=format.double_quant, quant_type=format.quant_type
    )
    parts = {"codes": packed.view(rows, columns // 2), "scales": state.absmax.view(rows, columns // 64)}
    if format.double_quant:
        parts["nested_scales"] = torch.cat([state.state2.absmax.flatten(), state.offset.view(1).to(weight.device)])
    return parts


def load_with_a_flipped_bit(folder: Path, format: Format, piece_bytes: int = PIECE_BYTES) -> str:
    """Load and prove in pieces, with one bit of one gathered tensor flipped on the last rank; the proof's complaint."""
    Meeting.new_port()
    processes = start_processes(60)
    unshard, sharded_rows.PIECE_BYTES = FSDPModule.unshard, piece_bytes

    def unshard_and_flip(unit: FSDPModule, async_op: bool = False) -> object:
        handle = unshard(unit, async_op)
        if unit is model.layers[1] and processes.rank == processes.num_ranks - 1:
            unit.linear3.codes.data.view(torch.uint8)[50, 7] ^= 1
        return handle

    try:
        model, units = load_blocks(folder, format, torch.float32, False, processes)
        FSDPModule.unshard = unshard_and_flip
        prove_shards(model, units, processes, processes.num_ranks)
        return "no complaint"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        FSDPModule.unshard, sharded_rows.PIECE_BYTES = unshard, PIECE_BYTES
        stop_processes()
