"""Merge an adapter into its base's weights, one file of the base at a time.

Each file of the result is written under a temporary name and renamed. So every file that is there is whole, and a merge
that was cut off resumes with the next one. It takes the memory of one file of the base and a few matrices, whatever the
model's size; where weights become codes, of one file of the result and a matrix.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from qlora_fsdp.common.errors import CheckpointError, RunFolderError
from qlora_fsdp.common.files import digest_file, free_bytes, remove_leftovers, replacing, write_json
from qlora_fsdp.common.foreign_files import named_templates, read_json_object
from qlora_fsdp.common.model_figures import MAX_CONFIG_BYTES
from qlora_fsdp.common.text import list_some, plural, show_bytes, show_size
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS, read_adapter_config
from qlora_fsdp.data.chats.stops import end_ids_of
from qlora_fsdp.data.stop_tokens import GENERATION_FILE
from qlora_fsdp.inference import merge_weights
from qlora_fsdp.inference.merge_formats import CompressedTensorsFormat, WeightFormat
from qlora_fsdp.layers.experts.llama4 import Llama4Moe
from qlora_fsdp.layers.quantized.linear import QuantizedLinear
from qlora_fsdp.model.adapters.apply import base_linears
from qlora_fsdp.model.new_tokens import count_tokens
from qlora_fsdp.model.positions import write_rope
from qlora_fsdp.runtime.run_command import log
from qlora_fsdp.weights.composed import Assignment, ComposedTensor
from qlora_fsdp.weights.safetensors_files import INDEX_NAME, SINGLE_NAME, StoredTensor
from qlora_fsdp.weights.scaled import UNUSED, ScaledTensor, name_of

EXTRA_NAME = "model-adapter.safetensors"
BASE_NAME = "model-base.safetensors"
RECORD_NAME = "merge.json"
# What an adapter's matrices are multiplied by follows from these settings of its adapter_config.json.
SCALING = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora")
NO_CHANGE = merge_weights.ParameterChange(Path(), {})
NUM_NAMED = 2  # of the largest weights without codes


def merge_files(merge: merge_weights.Merge) -> bool:
    """Write config, tokenizer and weights of the merged model to `merge.out`.

    Returns:
        Whether changed weights lay on the grid of the format in which they are written, and were rounded at random.

    Raises:
        CheckpointError: the base is quantized already, and its full-precision weights were asked for; or the result is
            to be quantized, and transformers would not load it, or rows are no whole groups.
        RunFolderError: `merge.out` holds something else, or can't be written, or has no room.
    """
    folder = merge.trained.files.folder
    assert folder is not None
    if not merge.dequantized and any(a.stored_parts for a in merge.meta.assignments):
        raise CheckpointError(
            f"{folder} is quantized and has no full-precision weights to merge onto. Set base=dequantized, or "
            "model.path to the model in full precision."
        )
    if merge.format is not None:
        _check_quantized(merge)
    changes = merge_weights.find_parameter_changes(merge.trained.model.base, merge.adapter)
    merge_weights.check_shared_layers(merge.trained.model.base, changes)
    with merging_to(merge.out):
        plan = plan_merge(merge, changes)
        _check_room(merge.out, plan)
        _open_folder(merge)
        if merge.format is not None:
            log.info(plan.describe(merge.format))
        merger = merge_weights.WeightMerger(merge, changes)
        _write_weights(merge, merger, plan)
        untied = any(assignment.stored is not None for assignment in plan.extra.values())
        _write_config(merge, folder, untied, plan)
    return merger.rounds_at_random


@contextmanager
def merging_to(out: Path) -> Iterator[None]:
    """Turn a failure to write to the folder of the result into an error that names the setting.

    Raises:
        RunFolderError: the folder can't be written: no permission, read-only, or full.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"out={out} can't be written: {error.strerror or error}. Free space there, or set out to a folder that you "
            "may write to."
        ) from error


def _open_folder(merge: merge_weights.Merge) -> None:
    """Make the folder, or take one in which the same merge was cut off."""
    lora = read_adapter_config(merge.adapter, "adapter")
    format = merge.format
    record = {
        "base": str(merge.trained.files.folder),
        "adapter": digest_file(merge.adapter / ADAPTER_WEIGHTS),
        "scaling": {key: lora.get(key) for key in SCALING},
        "dequantized": merge.dequantized,
        "quantize": None if format is None else format.name,
        "rounding": merge.rounding,
    }
    if isinstance(format, CompressedTensorsFormat):
        record["group_size"] = format.group_size
    merge.out.mkdir(parents=True, exist_ok=True)
    file = merge.out / RECORD_NAME
    if file.is_file():
        if _read_record(file) != record:
            raise RunFolderError(f"out={merge.out} holds another merge. Set out to a new folder, or remove this one.")
    elif any(merge.out.iterdir()):
        raise RunFolderError(f"out={merge.out} is not empty. Set out to a new folder.")
    write_json(file, record)


def _read_record(file: Path) -> dict[str, Any] | None:
    """What a merge that was cut off was made of; None where somebody else's file says something else."""
    try:
        return read_json_object(file, MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class MergePlan:
    """What is written.

    Attributes:
        by_file: the tensors of the base's files that the result has too, by the names of the result's files.
        extra: weights that the base's files lack, by their names.
        codes: which of the tensors become codes, by their keys, and what of the model each is.
        num_weights: how many numbers the result has, without scales of codes.
        num_bytes: of each file of the result, about.
    """

    by_file: dict[str, list[StoredTensor]]
    extra: dict[str, Assignment]
    codes: dict[str, merge_weights.PieceUse]
    num_weights: int
    num_bytes: dict[str, int]

    def missing_bytes(self, out: Path) -> int:
        """Of the files that are not there yet."""
        return sum(size for name, size in self.num_bytes.items() if not (out / name).is_file())

    @property
    def plain(self) -> list[StoredTensor]:
        """The tensors without codes, the largest first."""
        tensors = [stored for each in self.by_file.values() for stored in each if stored.key not in self.codes]
        return sorted(tensors, key=lambda stored: math.prod(stored.shape), reverse=True)

    def describe(self, format: WeightFormat) -> str:
        """What gets codes, and what does not."""
        num_coded = sum(use.num_weights for use in self.codes.values())
        num_plain = sum(math.prod(stored.shape) for stored in self.plain)
        group = "" if format.group_size is None else f" in groups of {format.group_size}"
        text = f"{format.name}{group}: {plural(len(self.codes), 'weight')} of {show_size(num_coded)} parameters"
        if num_plain:
            largest = ", ".join(stored.key for stored in self.plain[:NUM_NAMED])
            text += f". {show_size(num_plain)} parameters stay as the base has them, such as {largest}"
        return f"{text}."


def plan_merge(merge: merge_weights.Merge, changes: dict[str, merge_weights.ParameterChange]) -> MergePlan:
    """What the files of the result are.

    Raises:
        CheckpointError: weights would get codes or rows that can't be written.
    """
    _refuse_composed(merge, changes)
    extra = _find_extra(merge, changes)
    by_file = _find_merged(merge)
    if extra and SINGLE_NAME in by_file:  # transformers takes a file of that name for the whole model
        by_file[BASE_NAME] = by_file.pop(SINGLE_NAME)
    codes = merge_weights.find_codes(merge)
    assignments = _by_key(merge)
    num_weights = 0
    num_bytes = dict.fromkeys(by_file, 0)
    for name, tensors in by_file.items():
        for stored in tensors:
            if stored.key in codes:
                assert merge.format is not None
                num_elements = codes[stored.key].num_weights
                num_bytes[name] += int(num_elements * merge.format.bits / 8)
            elif stored.key in assignments:  # a base's codes of 4 bits are two to a byte
                num_elements = assignments[stored.key].num_elements
                num_bytes[name] += num_elements * merge_weights.written_dtype(stored, merge).itemsize
            else:
                num_elements = math.prod(stored.shape)
                num_bytes[name] += stored.num_bytes
            num_weights += num_elements
    return MergePlan(by_file, extra, codes, num_weights, num_bytes)


def _check_room(out: Path, plan: MergePlan) -> None:
    """Refuse a folder that has no room for the files that are not there yet.

    Raises:
        RunFolderError: it has none.
    """
    needed = plan.missing_bytes(out)
    free = free_bytes(out)
    if free < needed:
        raise RunFolderError(
            f"out={out} has room for {show_bytes(free)}, and the result takes {show_bytes(needed)} there. Free space, "
            "or set out to a folder on another disk."
        )


def _write_weights(merge: merge_weights.Merge, merger: merge_weights.WeightMerger, plan: MergePlan) -> None:
    """Write every file that is not there yet, and the index."""
    assignments = _by_key(merge)
    uses = merge_weights.find_uses(merge.meta.assignments)
    weight_map: dict[str, str] = {}
    for name, tensors in tqdm(plan.by_file.items(), desc="Merging", unit="file", disable=None):
        target = merge.out / name
        if not target.is_file():
            found: dict[str, Tensor] = {}
            for stored in tensors:
                assignment = assignments.get(stored.key)
                if stored.key in plan.codes:
                    found |= merger.codes(stored, plan.codes[stored.key])
                elif assignment is not None:
                    found[name_of(stored)] = merger.merged_weight(assignment)
                else:
                    found[name_of(stored)] = merger.merged_pieces(stored, uses.get(stored.key, []))
            _save(found, target)
        weight_map |= dict.fromkeys(_keys(target), name)
    if plan.extra:
        values = {name: merger.merged_weight(replace(assignment, name=name)) for name, assignment in plan.extra.items()}
        _save(values, merge.out / EXTRA_NAME)
        weight_map |= dict.fromkeys(values, EXTRA_NAME)
    if set(weight_map.values()) != {SINGLE_NAME}:
        size = sum((merge.out / name).stat().st_size for name in set(weight_map.values()))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(merge.out / INDEX_NAME, index)


def _by_key(merge: merge_weights.Merge) -> dict[str, Assignment]:
    """The weights of the model that are one tensor in the base's files, by the key of that."""
    by_key: dict[str, Assignment] = {}
    for assignment in merge.meta.assignments:
        if isinstance(assignment.stored, StoredTensor):
            by_key[assignment.stored.key] = assignment
    return by_key


def _find_left_out(merge: merge_weights.Merge) -> set[str]:
    """The keys of tensors in the base's files that the result does not need."""
    all_tensors = merge.trained.files.tensors
    assignments = _by_key(merge)
    left_out: set[str] = set()
    for assignment in assignments.values():
        left_out |= {tensor.key for tensor in assignment.stored_tensors if tensor is not assignment.stored}  # scales
        left_out.update(assignment.copies)  # of a tied table, which is written once
    scaled = _scaled_tensors(merge)
    if scaled:
        left_out |= {scales.key for tensor in scaled for scales in tensor.all_scales}
        left_out |= {key for key in all_tensors if key.endswith(UNUSED)}
    if merge.meta.head:  # of a classifier: the base has a head of its own, which nothing uses
        used = {*assignments, *merge_weights.find_uses(merge.meta.assignments)}
        left_out |= all_tensors.keys() - used
    return left_out


def _find_merged(merge: merge_weights.Merge) -> dict[str, list[StoredTensor]]:
    """The tensors of the base's files that the result has too, by the names of the files."""
    left_out = _find_left_out(merge)
    by_file: dict[str, list[StoredTensor]] = {}
    scaled = {tensor.key: tensor for tensor in _scaled_tensors(merge)}
    for stored in merge.trained.files.tensors.values():
        if stored.key not in left_out and not _is_state(stored.key):
            by_file.setdefault(stored.file.name, []).append(scaled.get(stored.key, stored))
    return by_file


def _scaled_tensors(merge: merge_weights.Merge) -> list[ScaledTensor]:
    """The tensors of the base's files whose values are scaled by blocks."""
    tensors = [tensor for assignment in merge.meta.assignments for tensor in assignment.stored_tensors]
    return [tensor for tensor in tensors if isinstance(tensor, ScaledTensor)]


def _check_quantized(merge: merge_weights.Merge) -> None:
    """Refuse a quantized result that transformers would not load, or that would have no codes.

    Raises:
        CheckpointError: it is Llama 4, or all its linear layers are of a class of the model's own; or rows are no whole
            groups, and would be with another setting.
    """
    model = merge.meta.model
    format = merge.format
    assert format is not None
    could = {name: each for name, each in base_linears(model) if merge_weights.is_quantizable(each, merge)}
    fixes: dict[str, list[str]] = {}
    for name, layer in could.items():
        fix = None if format.fits(layer.in_features) else format.fix_for(layer.in_features)
        if fix is not None:
            fixes.setdefault(fix, []).append(f"{name} ({layer.in_features} wide)")
    if fixes:
        fix = min(fixes, key=lambda each: int(each.partition("=")[2]))  # the smallest groups fit the others too
        layers = [layer for each in fixes.values() for layer in each]
        raise CheckpointError(
            f"group_size={format.group_size} does not divide the rows of {plural(len(layers), 'layer')}:\n"
            f"{list_some(layers)}\nSet {fix}."
        )
    reason = None
    if any(isinstance(module, Llama4Moe) for module in model.modules()):
        reason = "in quantized files of Llama 4 transformers looks for a layer for each expert, which there is none of"
    elif isinstance(format, CompressedTensorsFormat) and _has_plain_experts(merge):
        reason = "transformers loads experts of which the files have a matrix each only if they are codes too, which "
        reason += "these can't be in this format"
    elif not any(merge_weights.takes_codes(layer, merge) for layer in could.values()):
        reason = f"transformers loads codes for no layer of {type(model).__name__}"
        if could:
            widths = ", ".join(str(width) for width in sorted({layer.in_features for layer in could.values()}))
            reason = f"no layer has rows of whole groups of {format.group_size}: they are {widths} wide"
    if reason is not None:
        raise CheckpointError(f"quantize={format.name} can't be used: {reason}. Leave quantize out.")


def _has_plain_experts(merge: merge_weights.Merge) -> bool:
    """Whether the files have a matrix for each expert, and some of them would not become codes."""
    codes = merge_weights.find_codes(merge)
    for key, uses in merge_weights.find_uses(merge.meta.assignments).items():
        is_of_experts = len(uses[0].assignment.parameter.shape) > 1 and ".experts." in key
        if is_of_experts and key.endswith(".weight") and key not in codes:
            return True
    return False


def _refuse_composed(merge: merge_weights.Merge, changes: dict[str, merge_weights.ParameterChange]) -> None:
    """Tensors of the files that the model splits or joins stay as they are, and so have no codes and no new rows.

    Raises:
        CheckpointError: some would get them.
    """
    names: list[str] = []
    for assignment in merge.meta.assignments:
        if not isinstance(assignment.stored, ComposedTensor):
            continue
        gets_codes = merge.format is not None and isinstance(assignment.module, QuantizedLinear)
        gets_rows = bool(changes.get(assignment.name, NO_CHANGE).token_ids)
        if gets_codes or gets_rows:
            names.append(assignment.name)
    if names:
        raise CheckpointError(
            f"{merge.trained.files.folder} has {len(names)} weights in other tensors than the model, such as "
            f"{names[0]}, for which no codes and no new rows can be written. Load it with the installed transformers, "
            "save it with save_pretrained(FOLDER, save_original_format=False), and set model.path to that."
        )


def _find_extra(merge: merge_weights.Merge, changes: dict[str, merge_weights.ParameterChange]) -> dict[str, Assignment]:
    """Find what the base's files lack.

    These are a new head and, of two tied weights of which the adapter changes one, the one that the files do not name.
    """
    by_name = {assignment.name: assignment for assignment in merge.meta.assignments}
    extra = {name: assignment for name, assignment in by_name.items() if assignment.stored is None}
    ties = merge.meta.model.all_tied_weights_keys or {}
    for target, source in ties.items():
        if changes.get(target) is changes.get(source):  # neither is changed, or both are in the same way
            continue
        named, other = (source, target) if source in by_name else (target, source)
        assert isinstance(by_name[named].stored, StoredTensor)
        extra[other] = by_name[named]
    return extra


def _write_config(merge: merge_weights.Merge, folder: Path, untied: bool, plan: MergePlan) -> None:
    """Write config.json with what the merge changed, and copy the other small files of base and adapter."""
    for file in sorted(folder.iterdir()):
        is_small = file.suffix in (".json", ".txt", ".jinja", ".model", ".py") and "safetensors" not in file.name
        if file.is_file() and is_small and file.name != "config.json":
            _copy(file, merge.out / file.name)
    for file in sorted(merge.adapter.iterdir()):
        is_of_tokenizer = file.is_file() and "token" in file.name
        if file.suffix == ".py":  # code that is run is the base's alone
            continue
        if is_of_tokenizer or file.suffix == ".jinja":
            _copy(file, merge.out / file.name)
    named = merge.adapter if (merge.adapter / "tokenizer_config.json").is_file() else folder
    for name in named_templates(named):
        (merge.out / name).parent.mkdir(exist_ok=True)
        _copy(named / name, merge.out / name)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    if merge.meta.head:
        own = merge.meta.model.config
        config |= {key: getattr(own, key) for key in ("id2label", "label2id", "problem_type", "pad_token_id")}
        config["architectures"] = [type(merge.meta.model).__name__]
    num_tokens, num_rows = count_tokens(merge.meta.model)
    if num_tokens != num_rows:
        config.get("text_config", config)["vocab_size"] = num_tokens
    write_rope(config.get("text_config", config), merge.meta.config.get_text_config())
    if untied:
        config["tie_word_embeddings"] = False
    if merge.format is not None:
        linears = {
            name for name, layer in base_linears(merge.meta.model) if not merge_weights.takes_codes(layer, merge)
        }
        in_files = {_module_of(name_of(stored)) for stored in plan.plain if len(stored.shape) > 1}
        config["quantization_config"] = merge.format.config(sorted(linears), sorted(in_files), merge.dtype)
    if not merge.meta.head:
        _write_stops(merge)
    write_json(merge.out / "config.json", config)


def _write_stops(merge: merge_weights.Merge) -> None:
    """Adds the tokens at which answers ended in training to the generation_config.json, so that servers stop there.

    A base model's file names the end of a text alone, and an adapter may have learned to end with another token.
    """
    file = merge.out / GENERATION_FILE
    try:
        values = read_json_object(file, MAX_CONFIG_BYTES) if file.is_file() else {}
    except ValueError:  # it is the base's own, and nobody can generate by it
        return
    named = values.get("eos_token_id")
    known = named if isinstance(named, list) else [named]
    stops = [each for each in known if type(each) is int]
    added = [each for each in end_ids_of(merge.trained.tokenizer) if each not in stops]
    if added:
        write_json(file, {**values, "eos_token_id": [*stops, *added]})


def _module_of(key: str) -> str:
    """The module of a tensor in the files; where it is one of all experts, a pattern for the layers of each expert.

    A server may have linear layers where the model has none (routers), and layers of experts where the files have none.
    """
    module, _, name = key.rpartition(".")
    return module if name == "weight" else f"re:{re.escape(module)}\\..*"


def _is_state(key: str) -> bool:
    """Whether a stored tensor belongs to quantized codes, and is no weight itself."""
    return ".quant_state." in key or key.endswith((".quant_map", ".nested_quant_map", ".weight_format"))


def _keys(file: Path) -> Iterator[str]:
    with safe_open(file, "pt") as stored:
        yield from stored.keys()


def _save(tensors: dict[str, Tensor], target: Path) -> None:
    remove_leftovers(target)
    try:
        with replacing(target) as temporary:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {"format": "pt"})
    except SafetensorError as error:  # for example when the disk is full
        raise OSError(str(error)) from error


def _copy(file: Path, target: Path) -> None:
    with replacing(target) as temporary:
        shutil.copyfile(file, temporary)
