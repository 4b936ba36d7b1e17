"""Model files that are damaged, or that somebody forged: each is refused by one message that names the file and why."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qlora_fsdp.common.errors import CheckpointError
from qlora_fsdp.config.schema import ModelConfig, QuantConfig, Weights
from qlora_fsdp.model.build import BuildSettings, MetaModel, build_model
from qlora_fsdp.model.find import find_model
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.safetensors_files import INDEX_NAME, SINGLE_NAME, read_headers
from tests.cli.launch import ForkedLaunch
from tests.helpers.checkpoints import make_checkpoint, quantize_checkpoint

LAYER = "model.layers.1.mlp.up_proj"
DEEP = "[" * 100_000


def build(folder: Path, **quant: bool) -> MetaModel:
    files = find_model(ModelConfig(path=str(folder)), True, lambda error: error)
    return build_model(files, BuildSettings(QuantConfig(**quant), torch.float32, "eager"))


def load(folder: Path, **quant: bool) -> MetaModel:
    """Build the model on the CPU and read its weights, as one rank does."""
    built = build(folder, **quant)
    built.model.to_empty(device="cpu")
    fill_from_files(built.assignments, torch.device("cpu"), torch.float32)
    return built


def refusal(folder: Path, **quant: bool) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder, **quant)
    assert len(str(caught.value)) < 2500
    return str(caught.value)


@pytest.fixture
def model(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A model of several files with an index."""
    return Path(shutil.copytree(checkpoint("llama", torch.float32), tmp_path / "model"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("single") / "model", torch.float32, max_shard_size="1GB")


INDEXES = {
    "a list": ("[]", "it holds a list, and not an object"),
    "nothing": ("", "is damaged"),
    "no weight_map": ('{"metadata": {}}', "it has no weight_map"),
    "weight_map is a list": ('{"weight_map": ["a"]}', "it has no weight_map"),
    "weight_map is empty": ('{"weight_map": {}}', "it has no weight_map"),
    "a number": ('{"weight_map": {"a": 3}}', "a is to be in 3, which is no safetensors file of this folder"),
    "a file elsewhere": ('{"weight_map": {"a": "../b.safetensors"}}', "no safetensors file of this folder"),
    "a file anywhere": ('{"weight_map": {"a": "/b.safetensors"}}', "no safetensors file of this folder"),
    "another kind": ('{"weight_map": {"a": "pytorch_model.bin"}}', "no safetensors file of this folder"),
    "control characters": ('{"weight_map": {"\\u001b]0;x": "\\ud800/"}}', "?]0;x is to be in ?/, which"),
    "deep": ('{"weight_map": ' + DEEP, "is damaged: it is nested too deeply"),
    "no UTF-8": (b"\xff\xfe\xfa", "is damaged"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index(model: Path, case: str):
    content, message = INDEXES[case]
    (model / INDEX_NAME).write_bytes(content if isinstance(content, bytes) else content.encode())
    told = refusal(model)
    assert f"{model / INDEX_NAME} is damaged" in told and message in told


def test_an_index_leads_to_no_other_folder(model: Path, single: Path):
    """Not even one where there are the very tensors that the model lacks."""
    other = Path(shutil.copytree(single, model.parent / "other"))
    (other / SINGLE_NAME).rename(other / "all.safetensors")
    index = json.loads((model / INDEX_NAME).read_text())
    for name in ("../other/all.safetensors", str(other / "all.safetensors"), "x/../../other/all.safetensors"):
        index["weight_map"] = dict.fromkeys(index["weight_map"], name)
        (model / INDEX_NAME).write_text(json.dumps(index))
        assert "which is no safetensors file of this folder" in refusal(model)


def test_the_index_says_which_of_two_files_is_meant(model: Path):
    index = json.loads((model / INDEX_NAME).read_text())
    key, name = next(iter(index["weight_map"].items()))
    tensor = load_file(model / name)[key]
    save_file({key: tensor + 1}, model / "zzz.safetensors")
    index["weight_map"]["another"] = "zzz.safetensors"
    (model / INDEX_NAME).write_text(json.dumps(index))
    assert read_headers(model)[key].file.name == name


def test_an_index_that_an_older_model_left_behind_does_not_count(model: Path, single: Path):
    """transformers' save_pretrained removes the files that the index names, but not the index."""
    for file in model.glob("model-*.safetensors"):
        file.unlink()
    shutil.copy(single / SINGLE_NAME, model)
    assert {stored.file for stored in read_headers(model).values()} == {model / SINGLE_NAME}


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_file(file: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    def change(header: dict[str, Any]) -> dict[str, Any]:
        name = "model.norm.weight"
        return header | {name: header[name] | changes}

    return change


def twice(header: dict[str, Any]) -> bytes:
    text = json.dumps(header)
    return (text[:-1] + ', "model.norm.weight": ' + json.dumps(header["model.norm.weight"]) + "}").encode()


def shifted(by: int) -> Callable[[dict[str, Any]], Any]:
    """Every tensor from the second on lies some bytes further."""

    def change(header: dict[str, Any]) -> dict[str, Any]:
        first = min(value["data_offsets"][1] for key, value in header.items() if key != "__metadata__")
        return {
            key: value | {"data_offsets": [n + by for n in value["data_offsets"]]}
            if key != "__metadata__" and value["data_offsets"][0] >= first
            else value
            for key, value in header.items()
        }

    return change


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a list": (lambda header: [], "damaged inside its header, which is to name tensors"),
    "a number": (lambda header: 3, "damaged inside its header, which is to name tensors"),
    "no JSON": (lambda header: b"{", "Expecting property name"),
    "no UTF-8": (lambda header: b'{"\xff": 1}', "utf-8"),
    "deep": (lambda header: DEEP.encode(), "maximum recursion depth"),
    "a tensor is a list": (lambda header: {"a": [1]}, "damaged inside its header"),
    "no dtype": (lambda header: {"a": {"shape": [0], "data_offsets": [0, 0]}}, "damaged inside its header"),
    "another dtype": (entry(dtype="F4\x1b"), "model.norm.weight has dtype F4?, which is not one of"),
    "a dtype that is a list": (entry(dtype=[]), "damaged inside its header"),
    "bytes for another shape": (entry(shape=[63]), "which its shape and dtype do not take"),
    "a shape that is text": (entry(shape="64"), "has a shape or offsets that are no whole numbers"),
    "a negative size": (entry(shape=[-64]), "has a shape or offsets that are no whole numbers"),
    "a fraction": (entry(shape=[64.0]), "has a shape or offsets that are no whole numbers"),
    "a size that is true": (entry(shape=[64, True]), "has a shape or offsets that are no whole numbers"),
    "a thousand dimensions": (entry(shape=[1] * 1000), "has a shape or offsets that are no whole numbers"),
    "a product of millions of digits": (entry(shape=[2**62] * 10**5), "has a shape or offsets that are no whole"),
    "negative offsets": (entry(data_offsets=[-256, 0]), "has a shape or offsets that are no whole numbers"),
    "one offset": (entry(data_offsets=[0]), "unpack"),
    "offsets of 100 digits": (entry(data_offsets=[0, 10**100]), "has a shape or offsets that are no whole numbers"),
    "offsets that are a number": (entry(data_offsets=3), "damaged inside its header"),
    "a name that is there twice": (twice, "model.norm.weight is there twice"),
    "a gap": (shifted(4), "cut short"),
    "an overlap": (shifted(-4), "too long"),
    "a long name": (lambda header: {"x" * 10**6: 1}, "damaged inside its header"),
    "nothing": (lambda header: {}, "too long"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header(single: Path, tmp_path: Path, case: str):
    change, message = HEADERS[case]
    model = Path(shutil.copytree(single, tmp_path / "model"))
    header, data = header_of(model / SINGLE_NAME)
    write_file(model / SINGLE_NAME, change(header), data)
    told = refusal(model)
    assert "has files that can't be read" in told and SINGLE_NAME in told and message in told


def test_a_header_with_a_gap_or_an_overlap(tmp_path: Path):
    values = {"dtype": "U8", "shape": [4]}
    for first, message in ((8, "b and the tensor before it have a gap"), (2, "b and the tensor before it overlap")):
        header = {"a": values | {"data_offsets": [0, 4]}, "b": values | {"data_offsets": [first, first + 4]}}
        write_file(tmp_path / SINGLE_NAME, header, bytes(first + 4))
        with pytest.raises(CheckpointError, match=message):
            read_headers(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut short inside its header"),
        (b"\x01", "cut short inside its header"),
        (b"\xff" * 16, "cut short inside its header"),
        ((10**9).to_bytes(8, "little"), "cut short inside its header"),
        ("a pipe", "leads to a file outside the model's folder"),
    ],
)
def test_a_file_that_is_no_safetensors_file(single: Path, tmp_path: Path, content: Any, message: str):
    model = Path(shutil.copytree(single, tmp_path / "model"))
    (model / SINGLE_NAME).unlink()
    if content == "a pipe":
        os.mkfifo(model / SINGLE_NAME)
    else:
        (model / SINGLE_NAME).write_bytes(content)
    assert message in refusal(model)


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path):
    with (tmp_path / SINGLE_NAME).open("wb") as file:
        file.write((2**33).to_bytes(8, "little"))
        file.truncate(2**34)  # it takes no room on the disk
    with pytest.raises(CheckpointError, match=r"damaged inside its header \(8,589,934,592 bytes long\)"):
        read_headers(tmp_path)


CONFIGS: dict[str, Any] = {
    "hidden_size": ["64", 64.0, -64, True, 10**7, 10**400, {}],
    "num_hidden_layers": ["2", 10**6, 1e6, 10**12, -1, [2, "x"]],
    "vocab_size": [10**9],
    "num_attention_heads": [10**9],
    "max_position_embeddings": [10**12],
    "num_labels": [10**9],
    "text_config": [{"num_hidden_layers": 10**6}],
    "vision_config": [{"depth": 10**6}],
    "configuration_files": [["config.9.json"]],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in CONFIGS.items() for value in values])
def test_sizes_of_a_config(model: Path, name: str, value: Any):
    file = model / "config.json"
    config = json.loads(file.read_text()) | {name: value}
    file.write_text(json.dumps(config))
    told = refusal(model)
    assert f"model.path={model}: its config can't be used: " in told
    assert name in told or next(iter(value)) in told


@pytest.mark.parametrize("text", ["[]", "3", "null", "", DEEP, '{"a": ' + DEEP, "{" + " " * 2**24 + "}"])
def test_a_config_that_is_none(model: Path, text: str):
    (model / "config.json").write_text(text)
    assert f"model.path={model}: its config can't be used: " in refusal(model)


@pytest.mark.parametrize("value", ["64", 10**6, -1])
def test_sizes_of_the_settings(value: Any):
    """An adapter's file may set them too."""
    config = {"model_type": "llama", "num_hidden_layers": value}
    with pytest.raises(CheckpointError, match=r"num_hidden_layers=.* is no whole number from 0 to 4,096"):
        find_model(ModelConfig(weights=Weights.random, config=config), True, lambda error: error)


@pytest.mark.parametrize("value", ["x", [1], 3])
def test_a_description_of_quantization_that_is_none(model: Path, value: Any):
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": value}))
    assert "model.path=" in refusal(model) or "quantization_config is damaged" in refusal(model)


QUANTIZED: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def quantized(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, source = tmp_path_factory.mktemp("quantized"), checkpoint("llama", torch.float32)
    return {kind: quantize_checkpoint(source, folder / kind, **options) for kind, options in QUANTIZED.items()}


def state(**changes: Any) -> Callable[[Tensor], Tensor]:
    """Change bitsandbytes' description of a weight, which is JSON in a tensor of bytes."""

    def change(tensor: Tensor) -> Tensor:
        return text(json.dumps(json.loads(bytes(tensor.tolist())) | changes))

    return change


def text(content: str) -> Tensor:
    return torch.tensor(list(content.encode()), dtype=torch.uint8)


def with_value(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[1:3] = value
        return changed

    return change


NF4 = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
PARTS: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("nf4", f"{LAYER}.weight", lambda t: t[:1], "uint8 [1, 1] in the file, which is not 4,096 bytes of 4-bit codes"),
    ("nf4", f"{LAYER}.weight", lambda t: t.float(), "float32 [4096, 1] in the file, which is not 4,096 bytes"),
    ("nf4", f"{LAYER}.weight", lambda t: t.view(torch.int8), "int8 [4096, 1] in the file, which is not 4,096 bytes"),
    ("nf4", f"{LAYER}.weight.absmax", lambda t: t[:64], "float32 [64] in the file, which is not 128 scales"),
    ("nf4", f"{LAYER}.weight.absmax", lambda t: t.to(torch.bfloat16), "which is not 128 scales of torch.float32"),
    ("nf4", f"{LAYER}.weight.absmax", with_value(torch.nan), "absmax has 2 NaN or infinite values"),
    ("nf4", NF4.replace("up", "down"), state(blocksize=128), "float32 [128] in the file, which is not 64 scales"),
    ("nf4", NF4, state(blocksize=48), "its blocksize is 48"),
    ("nf4", NF4, state(blocksize=0), "its blocksize is 0"),
    ("nf4", NF4, state(blocksize="64"), "its blocksize is 64"),
    ("nf4", NF4, state(shape=[64, 128]), "[64, 128] in the file, [128, 64] by the config"),
    ("nf4", NF4, state(quant_type="fp4"), "its quant_type is fp4"),
    ("nf4", NF4, state(quant_type=[]), "its quant_type is []"),
    ("nf4", NF4, state(shape="x"), "its shape is x"),
    ("nf4", NF4, lambda t: text("[]"), f"has a damaged {NF4}"),
    ("nf4", NF4, lambda t: text("["), f"has a damaged {NF4}"),
    ("nf4", NF4, lambda t: text("[" * 60_000), f"has a damaged {NF4}"),
    ("nf4", NF4, lambda t: text(" " * 2**17), "it has 131,072 bytes"),
    ("nf4", NF4, lambda t: text("{}"), "'quant_type'"),
    (
        "nf4",
        f"{LAYER}.weight.quant_map",
        lambda t: t.flip(0),
        "quant_map: a code book that is not bitsandbytes' for nf4",
    ),
    ("nf4", f"{LAYER}.weight.quant_map", with_value(torch.nan), "quant_map: a code book that is not bitsandbytes' for"),
    (
        "nf4",
        f"{LAYER}.weight.quant_map",
        lambda t: t * 1.0001,
        "quant_map: a code book that is not bitsandbytes' for nf4",
    ),
    ("nf4", f"{LAYER}.weight.quant_map", lambda t: t[:4], "float32 [4] in the file, which is not 16 values of"),
    ("nf4", f"{LAYER}.weight.quant_map", lambda t: t.half(), "float16 [16] in the file, which is not 16 values of"),
    ("double", f"{LAYER}.weight.nested_quant_map", lambda t: -t, "a code book that is not bitsandbytes' for quantized"),
    ("double", NF4, state(nested_offset="x"), f"has a damaged {NF4}"),
    ("double", NF4, state(nested_offset=float("nan")), "its nested_offset is nan"),
    ("double", NF4, state(nested_offset=[1]), f"has a damaged {NF4}"),
    ("double", NF4, state(nested_offset=10**400), f"has a damaged {NF4}"),
    ("double", NF4, state(nested_blocksize=128), "its nested_blocksize is not 256"),
    ("double", f"{LAYER}.weight.absmax", lambda t: t.float(), "which is not 128 scales of torch.uint8"),
    ("double", f"{LAYER}.weight.nested_absmax", lambda t: torch.cat([t, t]), "which is not 1 scales"),
    ("double", f"{LAYER}.weight.nested_absmax", lambda t: t * torch.inf, "nested_absmax has 1 NaN or infinite value"),
    ("int8", f"{LAYER}.SCB", lambda t: t[:1], "float32 [1] in the file, which is not 128 scales"),
    ("int8", f"{LAYER}.SCB", lambda t: t.half(), "float16 [128] in the file, which is not 128 scales"),
    ("int8", f"{LAYER}.SCB", with_value(torch.inf), "SCB has 2 NaN or infinite values"),
    ("int8", f"{LAYER}.weight", lambda t: t.float(), "float32 [128, 64] in the file, which is not int8 [128, 64]"),
    ("int8", f"{LAYER}.weight", lambda t: t.t().contiguous(), "int8 [64, 128] in the file, which is not int8"),
    ("int8", f"{LAYER}.weight_format", lambda t: t + 1, "weight_format: the codes do not lie row by row"),
]


@pytest.mark.parametrize(("kind", "key", "change", "message"), PARTS)
def test_parts_of_a_quantized_weight(
    quantized: dict[str, Path], tmp_path: Path, kind: str, key: str, change: Callable[[Tensor], Tensor], message: str
):
    model = Path(shutil.copytree(quantized[kind], tmp_path / "model"))
    tensors = load_file(model / SINGLE_NAME)
    save_file(tensors | {key: change(tensors[key])}, model / SINGLE_NAME, {"format": "pt"})
    assert message in refusal(model)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_honest_quantized_weights(quantized: dict[str, Path], kind: str):
    load(quantized[kind])


BAD_VALUES = [
    (f"{LAYER}.weight", torch.nan, torch.float32),
    (f"{LAYER}.weight", -torch.inf, torch.bfloat16),
    ("model.embed_tokens.weight", torch.inf, torch.float16),
    ("model.norm.weight", torch.nan, torch.float32),
    ("lm_head.weight", torch.nan, torch.bfloat16),
]


@pytest.mark.parametrize(("key", "value", "dtype"), BAD_VALUES)
@pytest.mark.parametrize("quant", [{"load_in_4bit": True}, {"load_in_4bit": False, "load_in_8bit": True}])
def test_values_that_are_not_finite(
    single: Path, tmp_path: Path, key: str, value: float, dtype: torch.dtype, quant: dict[str, bool]
):
    model = Path(shutil.copytree(single, tmp_path / "model"))
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(model / SINGLE_NAME).items()}
    save_file(tensors | {key: with_value(value)(tensors[key])}, model / SINGLE_NAME, {"format": "pt"})
    told = refusal(model, **quant)
    assert f"{model / SINGLE_NAME}: {key} has 2 NaN or infinite values, with which nothing can be computed." in told


def test_values_that_are_infinite_where_they_are_quantized(single: Path, tmp_path: Path):
    model = Path(shutil.copytree(single, tmp_path / "model"))
    tensors = load_file(model / SINGLE_NAME)
    key = f"{LAYER}.weight"
    save_file(tensors | {key: with_value(1e6)(tensors[key])}, model / SINGLE_NAME, {"format": "pt"})
    assert f"{key} has 2 NaN or infinite values in float16" in refusal(model, load_in_4bit=False, load_in_8bit=True)
    load(model)


def test_all_ranks_end_with_the_message(single: Path, rows: Path, tmp_path: Path):
    """Only one of the two ranks reads the row with the value."""
    model = Path(shutil.copytree(single, tmp_path / "model"))
    tensors = load_file(model / SINGLE_NAME)
    key = f"{LAYER}.weight"
    tensors[key][-1, -1] = torch.nan
    save_file(tensors, model / SINGLE_NAME, {"format": "pt"})
    argv = [f"model.path={model}", "model.tokenizer_path=bytes", f"data.path={rows}", f"data.cache_folder={tmp_path}"]
    command = ForkedLaunch(tmp_path / "run", 2, *argv)
    assert command.finish() == 2, command.output
    (error,) = command.errors
    assert f"{model / SINGLE_NAME}: {key} has 1 NaN or infinite value" in error and "Traceback" not in command.output
