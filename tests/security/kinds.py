"""The kinds of files that `mutate.py` damages: what an honest one is, and what a command does with it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from qlora_fsdp import status
from qlora_fsdp.common.errors import CheckpointError, UserError, refuse
from qlora_fsdp.common.files import digest_file
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS, read_lora
from qlora_fsdp.config.checks.check_launch import check_accelerate_file
from qlora_fsdp.config.checks.check_settings import Needs, check_settings
from qlora_fsdp.config.reading.commands import load_command
from qlora_fsdp.config.schema import (
    BadRows,
    Config,
    DataConfig,
    DataFormat,
    LaunchConfig,
    LossOn,
    ModelConfig,
    QuantConfig,
)
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.chats.conversation import format_messages
from qlora_fsdp.data.read import find_source, iterate_rows
from qlora_fsdp.data.row import BadRow
from qlora_fsdp.data.tokenize import RowTokenizer
from qlora_fsdp.data.tokenize_source import _load_whole, load_source, tokenize_source
from qlora_fsdp.data.tokenizer import byte_tokenizer, load_tokenizer
from qlora_fsdp.generate import GenerateSettings
from qlora_fsdp.inference.completions import _read_generation
from qlora_fsdp.inference.prompts import chat_tokens
from qlora_fsdp.model.adapters.read_adapter import SavedAdapter
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import find_model
from qlora_fsdp.records.run_state import MANIFEST
from qlora_fsdp.training.checkpoints.checkpoint import digest_manifest, read_manifest
from qlora_fsdp.weights.fill import fill_from_files
from qlora_fsdp.weights.quantized_cache import use_cache
from tests.helpers import quick_config
from tests.helpers.checkpoints import make_checkpoint, quantize_checkpoint
from tests.helpers.lines import write_lines
from tests.helpers.one_process import one_process


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        make: writes a folder with an honest file of the kind.
        name: the file that is mutated, in this folder; a pattern that one file fits.
        read: what a command does with the folder.
        is_text: whether it is JSON or YAML, so that its values can be mutated too.
    """

    make: Callable[[Path], None]
    name: str
    read: Callable[[Path], None]
    is_text: bool = True


def _make_model(folder: Path, shard: str = "1GB") -> None:
    make_checkpoint("llama", folder, torch.float32, max_shard_size=shard)
    byte_tokenizer().save_pretrained(folder)


def _make_quantized(folder: Path) -> None:
    _make_model(folder / "source")
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantize_checkpoint(folder / "source", folder, **options)
    shutil.rmtree(folder / "source")


def load_model(folder: Path) -> None:
    files = find_model(ModelConfig(path=str(folder)), True, lambda error: error)
    built = build_model(files, BuildSettings(QuantConfig(), torch.float32, "eager"))
    if sum(parameter.numel() for parameter in built.model.parameters()) > 10**7:  # the plan says that it does not fit
        return
    built.model.to_empty(device="cpu")
    fill_from_files(built.assignments, torch.device("cpu"), torch.float32)


def _make_adapter(folder: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"q_proj": 8}, modules_to_save=["lm_head"])
    config.base_model_name_or_path = "org/name"
    config.trainable_token_indices = [1]
    config.save_pretrained(str(folder))
    rows = {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.zeros(1, 64)}
    save_file(rows, folder / ADAPTER_WEIGHTS)
    settings = {
        "model": {"path": "org/name", "name": "x", "revision": "main", "config": {"hidden_size": 64}},
        "tokenizer": {"add_tokens": ["a"]},
        "quant": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head"]},
        "task": {"name": "causal_lm", "labels": []},
        "training": {"packing": True},
    }
    (folder / "qlora_fsdp.yaml").write_text(json.dumps(settings))  # JSON is YAML


def _read_adapter(folder: Path) -> None:
    with quick_config.composing_quickly():
        _, config = load_command([f"adapter={folder}", "prompt=x"], GenerateSettings, "")
    check_settings(config, Needs(optional=("data.path",)))
    read_lora(folder)
    SavedAdapter(folder).read_tokens()


def make_run(folder: Path) -> None:
    (folder / "config.yaml").write_text("{}")
    (folder / "environment.json").write_text("{}")
    line = {"step": 1, "num_steps": 9, "loss": 1.5, "seconds": 0.1, "tokens_per_second_per_gpu": 9.0, "gpu_peak_gib": 1}
    (folder / "metrics.jsonl").write_text((json.dumps(line) + "\n") * 3 + '{"step": 3, "eval_loss": 1.0}\n')
    summary = {
        "status": "finished",
        "steps": 3,
        "final_loss": 1.5,
        "eval_loss": 1.0,
        "error": "none",
        "load_seconds": 1,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "sweep.json").write_text(json.dumps({"jobs": [{"folder": str(folder), "overrides": {"lora.r": "8"}}]}))


def _read_run(folder: Path) -> None:
    with mock.patch.object(status, "slurm_queue", dict):
        status.show_status([folder])


def _make_checkpoint_folder(folder: Path) -> None:
    (folder / "a").write_text("x")
    values = {
        "step": 2,
        "num_ranks": 1,
        "settings": {"lora.r": 8},
        "data": {"num_tokens": 5},
        "files": {"a": [1, digest_file(folder / "a")]},
        "eval_losses": [[1, 0.5]],
    }
    (folder / MANIFEST).write_text(json.dumps(values))


def _read_checkpoint(folder: Path) -> None:
    """Whoever forges a manifest writes its checksum too."""
    with suppress(ValueError, RecursionError, AttributeError, TypeError):
        values = json.loads((folder / MANIFEST).read_bytes())
        values.pop("sha256", None)
        (folder / MANIFEST).write_text(json.dumps(values | {"sha256": digest_manifest(values)}))
    read_manifest(folder)


def _make_rows(folder: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [
        {"messages": messages},
        {"prompt": "a", "completion": "b"},
        {"text": "c"},
        {"instruction": "d", "output": "e"},
    ]
    write_lines(folder / "rows.jsonl", rows)
    pq.write_table(pa.table({"prompt": ["a", "b"] * 50, "completion": ["c", None] * 50}), folder / "rows.parquet")


def _row_reader(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        source = find_source(str(folder / name), DataConfig(path=str(folder / name)))
        tokenizer = RowTokenizer(byte_tokenizer(), DataFormat.auto, LossOn.completion, 64, BadRows.skip)
        rows = list(iterate_rows(source))
        tokenizer({"place": [place for place, _ in rows], "row": [row for _, row in rows]})

    return read


def _read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)), DataConfig())
    tokenizer("Hi")
    tokenizer.save_pretrained(folder / "saved")


def _make_generation(folder: Path) -> None:
    values = {"eos_token_id": [257, 2], "pad_token_id": 258, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    more = {"num_beams": 2, "repetition_penalty": 1.1, "max_length": 4096, "bos_token_id": 256}
    (folder / "generation_config.json").write_text(json.dumps(values | more))
    _make_model(folder)


def _read_generation_config(folder: Path) -> None:
    load_tokenizer(ModelConfig(path=str(folder)), DataConfig())  # remembers the ids at which generation stops
    _read_generation(folder / "generation_config.json")


def _render_chat(folder: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)), DataConfig())
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    with suppress(BadRow):  # of a run, rows that its template refuses are counted
        format_messages(chat, None, LossOn.completion, tokenizer)
        chat_tokens(tokenizer, chat[:1], None, "the prompt")


def _make_accelerate(folder: Path) -> None:
    lines = {"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "bf16", "machine_rank": 0}
    more = {"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": False}, "main_process_port": 29500}
    (folder / "accelerate.yaml").write_text(json.dumps(lines | more))  # JSON is YAML


def _read_accelerate(folder: Path) -> None:
    refuse(check_accelerate_file(LaunchConfig(config_file=str(folder / "accelerate.yaml"))))


def _spec(folder: Path) -> DataSpec:
    """Data whose cache is in the folder; the rows themselves are beside it, as copies of them would be other data."""
    data = DataConfig(path=str(folder.parent / "cached.jsonl"), cache_folder=str(folder))
    return DataSpec.of(Config(data=data))


def _make_tokenized(folder: Path) -> None:
    rows = [{"prompt": f"question {number}", "completion": "answer " * number} for number in range(1, 9)]
    write_lines(folder.parent / "cached.jsonl", rows)
    tokenize_source(str(folder.parent / "cached.jsonl"), _spec(folder), byte_tokenizer())


def _read_tokenized(folder: Path) -> None:
    """As a run does, which makes an entry anew whose bytes are not those that were written."""
    (entry,) = (path for path in folder.iterdir() if path.is_dir())
    spec = _spec(folder)
    with _quiet():
        if _load_whole(entry, spec) is None:
            raise UserError("it is made anew")
    rows, _ = load_source(spec.settings.path, spec, byte_tokenizer(), 259)
    for row in range(len(rows.num_targets)):
        rows.read(row)


def _make_quantized_cache(folder: Path) -> None:
    _make_model(folder.parent / "cached")
    _use_quantized_cache(folder, writes=True)


def _use_quantized_cache(folder: Path, writes: bool = False) -> None:
    files = find_model(ModelConfig(path=str(folder.parent / "cached")), True, lambda error: error)
    built = build_model(files, BuildSettings(QuantConfig(), torch.float32, "eager"))
    with _quiet() as told:
        assignments = use_cache(built.assignments, "base", str(folder), torch.float32, one_process(), writes)
    if any("can't be used" in line for line in told):
        raise UserError("it is made anew")
    built.model.to_empty(device="cpu")
    fill_from_files(assignments, torch.device("cpu"), torch.float32)


@contextmanager
def _quiet() -> Iterator[list[str]]:
    """What is logged meanwhile, which is not shown."""
    told: list[str] = []
    log = logging.getLogger("qlora_fsdp")
    with mock.patch.object(log, "handle", lambda record: told.append(record.getMessage())):
        yield told


def _make_gguf(folder: Path) -> None:
    """A model that somebody has for llama.cpp, with the config of the one it was made of."""
    _make_model(folder)
    (folder / "model.safetensors").unlink()
    strings = b"".join(len(text).to_bytes(8, "little") + text for text in (b"general.architecture", b"llama"))
    (folder / "model.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + strings)


def _refuse_gguf(folder: Path) -> None:
    """None is read, whatever is in it."""
    try:
        load_model(folder)
    except CheckpointError as error:
        if "neither model.safetensors nor" in str(error):
            return
    raise AssertionError("a model of no known format was not refused")


def _make_processor(folder: Path) -> None:
    _make_model(folder)
    image = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224}, "do_resize": True}
    whole = {"processor_class": "LlavaProcessor", "patch_size": 14, "image_token": "<image>", "chat_template": "x"}
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(json.dumps(whole | {"image_processor": image}))


def _read_processor(folder: Path) -> None:
    _read_tokenizer(folder)
    find_model(ModelConfig(path=str(folder)), True, lambda error: error)


PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
TOKENIZED = ("report.json", "digests.json", "tokens.bin", "starts.bin", "places.arrow")
QUANTIZED = ("cache.json", "model.safetensors.index.json", "quantized-00001.safetensors")
KINDS_OF_FILES = {
    "generation_config.json": Kind(_make_generation, "generation_config.json", _read_generation_config),
    "chat_template.jinja": Kind(_make_model, "chat_template.jinja", _render_chat, is_text=False),
    "accelerate's file": Kind(_make_accelerate, "accelerate.yaml", _read_accelerate),
    "config.json": Kind(_make_model, "config.json", load_model),
    "index": Kind(lambda folder: _make_model(folder, "100KB"), "model.safetensors.index.json", load_model),
    "safetensors": Kind(_make_model, "model.safetensors", load_model, is_text=False),
    "quantized safetensors": Kind(_make_quantized, "model.safetensors", load_model, is_text=False),
    "adapter_config.json": Kind(_make_adapter, "adapter_config.json", _read_adapter),
    "qlora_fsdp.yaml": Kind(_make_adapter, "qlora_fsdp.yaml", _read_adapter),
    "adapter_model.safetensors": Kind(_make_adapter, ADAPTER_WEIGHTS, _read_adapter, is_text=False),
    "tokenizer_config.json": Kind(_make_model, "tokenizer_config.json", _read_tokenizer),
    "tokenizer.json": Kind(_make_model, "tokenizer.json", _read_tokenizer),
    "summary.json": Kind(make_run, "summary.json", _read_run),
    "metrics.jsonl": Kind(make_run, "metrics.jsonl", _read_run),
    "sweep.json": Kind(make_run, "sweep.json", _read_run),
    "manifest.json": Kind(_make_checkpoint_folder, MANIFEST, _read_checkpoint),
    "JSONL": Kind(_make_rows, "rows.jsonl", _row_reader("rows.jsonl")),
    "Parquet": Kind(_make_rows, "rows.parquet", _row_reader("rows.parquet"), is_text=False),
    "GGUF": Kind(_make_gguf, "model.gguf", _refuse_gguf, is_text=False),
    **{name: Kind(_make_processor, name, _read_processor) for name in PROCESSORS},
    **{
        f"tokenized cache's {name}": Kind(_make_tokenized, f"*/{name}", _read_tokenized, name.endswith(".json"))
        for name in TOKENIZED
    },
    **{
        f"quantized cache's {name}": Kind(
            _make_quantized_cache, f"*/{name}", _use_quantized_cache, name.endswith(".json")
        )
        for name in QUANTIZED
    },
}
