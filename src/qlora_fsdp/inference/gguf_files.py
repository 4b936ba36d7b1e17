"""Merged models and adapters as GGUF, the files of llama.cpp, Ollama and LM Studio.

llama.cpp's own converter writes them from what `merge` has written: it knows the names, the order of rows and the
tokenizer of every architecture that llama.cpp runs. It comes with llama.cpp's sources, and no package of its makers has
it; so its folder is named, or it is on the PATH (where Homebrew puts it). Blocks of 4 bits, which the converter does
not write, are packed by the makers' package `gguf` afterwards.

llama.cpp multiplies an adapter's product by lora_alpha / rank, with the rank of each layer's matrices, and knows no
rsLoRA and no patterns: other scalings go into B.
"""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import peft
from safetensors.torch import save_file

from qlora_fsdp.common.errors import AdapterError, CheckpointError, Problem, RunFolderError
from qlora_fsdp.common.files import free_bytes, remove_leftovers, replacing
from qlora_fsdp.common.foreign_files import read_json_object
from qlora_fsdp.common.model_figures import MAX_CONFIG_BYTES
from qlora_fsdp.common.text import printable_lines, show_bytes
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS, PREFIX
from qlora_fsdp.inference.merge_files import MergePlan
from qlora_fsdp.inference.merge_weights import VALUES_A_TIME, ParameterChange, find_parameter_changes
from qlora_fsdp.model.adapters.serving import adapted_experts
from qlora_fsdp.model.assemble import AssembledModel

MODEL_CONVERTER = "convert_hf_to_gguf.py"
ADAPTER_CONVERTER = "convert_lora_to_gguf.py"
OF_CONVERTER = ("f32", "f16", "bf16", "q8_0")
MODEL_TYPES = (*OF_CONVERTER, "q4_0")
GGUF_BLOCK = 32  # weights that share a scale in Q4_0 and Q8_0
ENDS = ("token_embd", "output")  # embeddings and head in GGUF
# Bytes of 32 weights in each type: those of 8 and of 4 bits have a scale of 16 bits beside them
BLOCK_BYTES = {"f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q4_0": 18}
FULL_DISK = rf"\[Errno {errno.ENOSPC}\]|\d+ requested and \d+ written"  # in an error of Python's, and of numpy's
SHOWN_LINES = 8  # of what the converter said, where it fails
NAMING_CODE = ("config.json", "tokenizer_config.json")  # files by which transformers finds code of a model's own


def gguf_problems(types: Sequence[str], writes_adapter: bool, llama_cpp: str | None) -> Iterator[Problem]:
    """What is wrong with the settings of GGUF files; found before anything is merged.

    Args:
        types: of the files that are wanted; empty for none.
        writes_adapter: whether they are of the adapter alone.
        llama_cpp: folder of the converter, as it was typed.
    """
    if not types:
        if llama_cpp is not None:
            yield Problem(f"llama_cpp={llama_cpp}", "has no effect without gguf=.", "Leave it out, or set gguf=q8_0.")
        return
    typed = f"gguf={','.join(types)}"
    allowed = OF_CONVERTER if writes_adapter else MODEL_TYPES
    unknown = [name for name in types if name not in allowed]
    if unknown:
        yield Problem(typed, f"has {', '.join(unknown)}, which is not written.", f"Set types of {', '.join(allowed)}.")
    missing = [name for name in ("gguf", "sentencepiece") if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"needs packages of llama.cpp's converter that are not installed: {', '.join(missing)}."
        yield Problem(typed, reason, f"pip install {' '.join(missing)}")
    if find_converter(ADAPTER_CONVERTER if writes_adapter else MODEL_CONVERTER, llama_cpp) is None:
        name = ADAPTER_CONVERTER if writes_adapter else MODEL_CONVERTER
        where = "on the PATH" if llama_cpp is None else f"in llama_cpp={llama_cpp}"
        fix = (
            "git clone --depth 1 https://github.com/ggml-org/llama.cpp, and set llama_cpp to that folder; sources of "
            "the package llama-cpp-python have it too, in vendor/llama.cpp."
        )
        yield Problem(typed, f"needs llama.cpp's {name}, which is not {where}.", fix)


def find_converter(name: str, llama_cpp: str | None) -> Path | None:
    """A converter of llama.cpp's: in the folder that is named, or on the PATH; None where it is not there."""
    if llama_cpp is not None:
        file = Path(llama_cpp).expanduser().resolve() / name
        return file if file.is_file() else None
    found = shutil.which(name)
    return None if found is None else Path(found).resolve()


def check_code(base: Path, adapter: Path, trusts_code: bool) -> None:
    """Refuse files that name code of their own: llama.cpp's converter lets transformers run it without a question.

    Args:
        base: folder of the base model.
        adapter: folder of the adapter, whose tokenizer goes into the merged model.
        trusts_code: whether the base's own code may run; an adapter's may not in any case.

    Raises:
        CheckpointError: a file names code, or can't be read.
    """
    if not trusts_code:
        check_base_code(base)
    fix = "Remove auto_map from it, or leave gguf out; model.trust_remote_code=true is for the base model alone."
    _check_code(adapter, fix)


def check_base_code(folder: Path) -> None:
    """Refuse a base, or a model made of it, that names code of its own, which nobody has allowed.

    Raises:
        CheckpointError: a file names code, or can't be read.
    """
    _check_code(folder, "If you trust that code, set model.trust_remote_code=true; else leave gguf out.")


def _check_code(folder: Path, fix: str) -> None:
    for name in NAMING_CODE:
        file = folder / name
        if not file.is_file():
            continue
        try:
            names_code = _has_auto_map(read_json_object(file, MAX_CONFIG_BYTES))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"gguf can't be written: {file} can't be read: {error}. Leave gguf out.") from error
        if names_code:
            raise CheckpointError(
                f"gguf can't be written: {file} names code that comes with it (auto_map), and llama.cpp's converter "
                f"would run that. {fix}"
            )


def _has_auto_map(values: Any) -> bool:
    """Whether something in a JSON file has the name by which transformers finds code."""
    waiting = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "auto_map" in value:
                return True
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
    return False


def gguf_name(kind: str, type_name: str) -> str:
    """The name of a GGUF file, such as `model-Q8_0.gguf`."""
    return f"{kind}-{type_name.upper()}.gguf"


def check_gguf_room(out: Path, types: Sequence[str], plan: MergePlan) -> None:
    """Refuse a folder that has no room for a merged model and its GGUF files, before anything is merged.

    Args:
        out: the folder, which may have some of the files already.
        types: of the GGUF files.
        plan: what the merge writes.

    Raises:
        RunFolderError: it has less room than the files take that are missing.
    """
    missing = [name for name in types if not (out / gguf_name("model", name)).is_file()]
    sizes = [plan.num_weights * BLOCK_BYTES[name] // GGUF_BLOCK for name in missing]
    if "q4_0" in missing:
        sizes.append(plan.num_weights * BLOCK_BYTES["f16"] // GGUF_BLOCK)  # the file of which it is made
    needed = sum(sizes) + plan.missing_bytes(out)
    free = free_bytes(out)
    if free < needed:
        raise RunFolderError(
            f"out={out} has room for {show_bytes(free)}, and the merged model and its GGUF files "
            f"({', '.join(missing)}) take {show_bytes(needed)}. Free space there, set out to a folder on another disk, "
            "or leave types out of gguf."
        )


def write_gguf_model(merged: Path, types: Sequence[str], llama_cpp: str | None, trusts_code: bool) -> list[Path]:
    """Write a merged model's GGUF files into its folder, whole or not at all; those that are there stay.

    Args:
        merged: the folder of the model, in safetensors that are not quantized.
        types: of the files, of `MODEL_TYPES`.
        llama_cpp: folder of the converter; None: it is on the PATH.
        trusts_code: whether code that comes with the model may run, as it does in the converter.

    Raises:
        CheckpointError: the model has such code, and it may not run; or the converter failed, with its last lines.
    """
    if not trusts_code:
        check_base_code(merged)
    converter = find_converter(MODEL_CONVERTER, llama_cpp)
    assert converter is not None
    files = [merged / gguf_name("model", name) for name in types]
    for name, file in zip(types, files, strict=True):
        if file.is_file():
            continue
        remove_leftovers(file)  # of a merge that was killed, which may be as large as the file
        with replacing(file) as temporary:
            if name in OF_CONVERTER:
                _convert(converter, [str(merged), "--outfile", str(temporary), "--outtype", name])
                continue
            whole = temporary.with_name(f"{temporary.name}.16-bit")
            try:
                _convert(converter, [str(merged), "--outfile", str(whole), "--outtype", "auto"])
                _pack_4_bits(whole, temporary)
            finally:
                whole.unlink(missing_ok=True)
    return files


def _convert(converter: Path, arguments: Sequence[str]) -> None:
    """Run one of llama.cpp's converters.

    Raises:
        CheckpointError: it failed.
        OSError: it did because the disk is full.
    """
    # Its modules lie beside it, where Python does not look while PYTHONSAFEPATH is set.
    paths = [str(converter.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, str(converter), *arguments],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=environment,
    )
    if done.returncode and re.search(FULL_DISK, done.stderr):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if done.returncode:
        said = printable_lines("\n".join(done.stderr.strip().splitlines()[-SHOWN_LINES:]))
        raise CheckpointError(
            f"llama.cpp's {converter.name} can't write this model as GGUF. Leave gguf out, or set llama_cpp to a newer "
            f"llama.cpp. It said:\n{said}"
        )


def _pack_4_bits(source: Path, target: Path) -> None:
    """Write a GGUF file once more, its matrices in Q4_0; embeddings and head in Q8_0, as they suffer most.

    One tensor is in memory at a time, in 4 or 8 bits.

    Args:
        source: a file of 16 or 32 bits.
        target: a file that does not exist yet.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        written_by_writer = name.startswith("GGUF.") or name == gguf.Keys.General.ARCHITECTURE
        if written_by_writer or name == gguf.Keys.General.FILE_TYPE:
            continue
        value_type = field.types[0]
        sub_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, sub_type)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    types = {tensor.name: _packed_type(tensor) for tensor in reader.tensors}
    for tensor in reader.tensors:
        name = tensor.name
        data = tensor.data
        if types[name] == tensor.tensor_type:
            writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=tensor.tensor_type)
            continue
        shape = [int(size) for size in reversed(tensor.shape)]
        packed = gguf.quants.quant_shape_to_byte_shape(shape, types[name])
        writer.add_tensor_info(name, packed, np.dtype(np.uint8), math.prod(packed), raw_dtype=types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        data = tensor.data
        if types[tensor.name] != tensor.tensor_type:
            data = _repack(data, tensor.tensor_type, types[tensor.name])
        writer.write_tensor_data(data)
    writer.close()


def _repack(data: np.ndarray, stored: Any, wanted: Any) -> np.ndarray:
    """The rows of a tensor in another of GGUF's types, a few megabytes of values at a time.

    Args:
        data: as the reader has them, [..., a row's bytes or values].
        stored: their type.
        wanted: the type of the result, [rows, bytes].
    """
    from gguf import quants

    rows = data.reshape(-1, data.shape[-1])
    step = max(1, VALUES_A_TIME // rows.shape[1])
    blocks = [rows[start : start + step] for start in range(0, len(rows), step)]
    return np.concatenate([quants.quantize(quants.dequantize(block, stored), wanted) for block in blocks])


def _packed_type(tensor: Any) -> Any:
    """The type in which a tensor of a GGUF file is written in 4 bits: matrices whose rows are whole blocks, as Q4_0."""
    from gguf import GGMLQuantizationType

    is_matrix = len(tensor.shape) > 1 and tensor.name.endswith(".weight")
    if not is_matrix or tensor.shape[0] % GGUF_BLOCK or tensor.tensor_type == GGMLQuantizationType.F32:
        return tensor.tensor_type
    return GGMLQuantizationType.Q8_0 if tensor.name.startswith(ENDS) else GGMLQuantizationType.Q4_0


def write_gguf_adapter(
    trained: AssembledModel, adapter: Path, out: Path, types: Sequence[str], llama_cpp: str | None
) -> list[Path]:
    """Write an adapter alone as GGUF files, for llama.cpp's --lora.

    Args:
        trained: base and adapter on meta.
        adapter: its folder.
        out: a folder.
        types: of the files, of `OF_CONVERTER`.
        llama_cpp: folder of the converter; None: it is on the PATH.

    Raises:
        AdapterError: llama.cpp reads no such adapter.
        CheckpointError: the converter failed; with its last lines.
    """
    converter = find_converter(ADAPTER_CONVERTER, llama_cpp)
    assert converter is not None
    config = peft.LoraConfig.from_pretrained(str(adapter))
    changes = find_parameter_changes(trained.model.base, adapter)
    _check_adapter(trained, adapter, config, changes)
    base = trained.files.folder
    out.mkdir(parents=True, exist_ok=True)
    files = [out / gguf_name("adapter", name) for name in types]
    with TemporaryDirectory() as temporary:
        plain = Path(temporary)
        tensors = {}
        for name, change in changes.items():
            a, b = change.read("lora_A.weight"), change.read("lora_B.weight")
            layer = f"{PREFIX}{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_A.weight"] = a.float().contiguous()
            tensors[f"{layer}.lora_B.weight"] = b.float() * (change.scaling * len(a) / config.lora_alpha)
        save_file(tensors, plain / ADAPTER_WEIGHTS, {"format": "pt"})
        replace(config, use_rslora=False, rank_pattern={}, alpha_pattern={}).save_pretrained(str(plain))
        for name, file in zip(types, files, strict=True):
            with replacing(file) as written:
                _convert(converter, [str(plain), "--base", str(base), "--outfile", str(written), "--outtype", name])
    return files


def _check_adapter(
    trained: AssembledModel, adapter: Path, config: peft.LoraConfig, changes: Mapping[str, ParameterChange]
) -> None:
    kinds = {
        "is a DoRA adapter": config.use_dora,
        "holds whole layers (modules_to_save)": any("whole" in change.keys for change in changes.values()),
        "has rows for tokens (trainable_token_indices)": config.trainable_token_indices,
        "adapts experts": next(adapted_experts(trained.model.base), None),
    }
    if any(change.is_of_embeddings for change in changes.values()):
        raise AdapterError(
            f"write=adapter gguf: adapter={adapter} adapts embeddings, which is not written for llama.cpp here. Set "
            "write=model, which makes one model of both."
        )
    found = [kind for kind, is_so in kinds.items() if is_so]
    if found:
        raise AdapterError(
            f"write=adapter gguf: adapter={adapter} {found[0]}, which llama.cpp does not read beside a base. Set "
            "write=model, which makes one model of both."
        )
