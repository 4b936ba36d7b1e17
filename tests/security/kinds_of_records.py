"""More kinds of files that `mutate.py` damages: records of runs and commands, other projects' settings, scaled weights.

Whoever forges a file with a checksum writes that too, so it is made anew.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from transformers import AutoModelForCausalLM

from qlora_fsdp.common.errors import RunFolderError, UserError
from qlora_fsdp.common.files import digest_file
from qlora_fsdp.config.adapter.adapter_config import ADAPTER_WEIGHTS
from qlora_fsdp.config.convert.__main__ import convert_file
from qlora_fsdp.config.schema import (
    Config,
    DataConfig,
    DataFormat,
    LoraConfig,
    ModelConfig,
    QuantConfig,
    TaskConfig,
    TaskName,
)
from qlora_fsdp.config.schema.distill import SCORES_HEADER
from qlora_fsdp.config.specs import DataSpec
from qlora_fsdp.data.questions import Question, prepare_questions
from qlora_fsdp.data.read_answers import read_answers
from qlora_fsdp.data.report_rows import ReportRows, read_report_rows, write_report_rows
from qlora_fsdp.data.row import BadRow, parse_row
from qlora_fsdp.data.streams.kept_windows import KeptWindows, _digest, _name
from qlora_fsdp.data.streams.share import Share, ShareTable
from qlora_fsdp.data.streams.windows import Place
from qlora_fsdp.data.teacher_scores import RowScores, ScoreWriter, TeacherScores, digest_tokens, join_scores
from qlora_fsdp.data.tokenizer import byte_tokenizer
from qlora_fsdp.inference.merge_files import _read_record
from qlora_fsdp.model.adapters.apply import apply_adapters
from qlora_fsdp.model.adapters.other_adapter import OtherAdapter
from qlora_fsdp.model.adapters.read_adapter import SavedAdapter
from qlora_fsdp.model.build import BuildSettings, build_model
from qlora_fsdp.model.find import find_model
from qlora_fsdp.predict.__main__ import PredictionFile
from qlora_fsdp.records.run_state import WINDOWS_FOLDER
from qlora_fsdp.report.page import write_report
from qlora_fsdp.training.checkpoints.saved_tensors import BadFile, rank_file, read_index, read_rows, write_index
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lines import write_lines
from tests.helpers.one_process import one_process
from tests.helpers.scaled_checkpoints import make_compressed, make_fp8
from tests.security.kinds import Kind, load_model, make_run

PROJECTS = Path(__file__).parents[1] / "helpers" / "other_projects"
PLACE = Place.first(1)


def _make_run(folder: Path) -> None:
    make_run(folder)
    settings = {"run.name": "x", "model.path": "org/name", "data.path": "rows.jsonl", "lora.r": 8}
    (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    about = {"time": "2026-01-01T00:00:00", "gpu": "H200", "packages": {"torch": "2.13"}, "git": {"commit": "1"}}
    (folder / "environment.json").write_text(json.dumps(about))
    rows = [{"step": 1, "prompt": "a", "completion": "b", "reference": "c"}]
    write_lines(folder / "generations.jsonl", rows)
    summary = json.loads((folder / "summary.json").read_text())
    more = {"seconds": 60.0, "mix": {"rows.jsonl": "once"}, "plan": {"total_gib": 1.5}, "peak": {"gpu_gib": 1.0}}
    (folder / "summary.json").write_text(json.dumps(summary | more))


def _report(folder: Path) -> None:
    write_report([folder])


def _make_fp8(folder: Path) -> None:
    make_checkpoint("llama", folder / "source", torch.float32, max_shard_size="1GB")
    make_fp8(folder / "source", folder / "fp8")
    shutil.rmtree(folder / "source")


def _make_report_rows(folder: Path) -> None:
    rows = [(np.arange(9, dtype=np.int32), np.arange(9) > 3), (np.arange(5, dtype=np.int32), np.arange(5) > 1)]
    write_report_rows(ReportRows(rows, are_held_out=True), folder / "rows.safetensors")


def _read_report_rows(folder: Path) -> None:
    file = folder / "rows.safetensors"
    read_report_rows(file, digest_file(file), vocab_size=10)


def _make_second_adapter(folder: Path) -> None:
    make_checkpoint("llama", folder / "base", torch.float32, max_shard_size="1GB")
    stock = AutoModelForCausalLM.from_pretrained(folder / "base")
    get_peft_model(stock, PeftConfig(r=4, target_modules=["q_proj", "v_proj"])).save_pretrained(folder / "adapter")


def _use_second_adapter(folder: Path) -> None:
    """As a teacher of task=distill is: read, and put in place for a pass."""
    files = find_model(ModelConfig(path=str(folder / "base")), True, lambda error: error)
    built = build_model(files, BuildSettings(QuantConfig(load_in_4bit=False), torch.float32, "eager"))
    model = apply_adapters(built.model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    assert isinstance(model, peft.PeftModel)
    saved = SavedAdapter(folder / "adapter", "distill.teacher_adapter")
    teacher = OtherAdapter(saved, model, torch.device("cpu"))
    saved.check_values(one_process())
    for layer, (first, second, scaling) in teacher.matrices.items():
        assert second(first(torch.zeros(1, layer.in_features))).mul(scaling).shape == (1, layer.out_features)


def _make_predictions(folder: Path) -> None:
    lines = [{"data.path": "rows.jsonl", "adapter": "x"}, {"prediction": "good"}, {"prediction": "bad"}]
    write_lines(folder / "out.jsonl.part", lines)


def _read_predictions(folder: Path) -> None:
    file = PredictionFile(folder / "out.jsonl", {"data.path": "rows.jsonl", "adapter": "x"})
    if file.open() != 2:
        raise RunFolderError("it goes on with the others")
    file.finish([{"text": "a"}, {"text": "b"}])


def _make_merge(folder: Path) -> None:
    (folder / "merge.json").write_text(json.dumps({"base": "x", "scaling": {"r": 8}, "quantize": None}))


def _read_merge(folder: Path) -> None:
    if _read_record(folder / "merge.json") is None:
        raise RunFolderError("it holds another merge")


def _converter(project: str, name: str) -> Kind:
    def make(folder: Path) -> None:
        shutil.copytree(PROJECTS / project, folder, dirs_exist_ok=True)

    def read(folder: Path) -> None:
        (file,) = (found for found in (PROJECTS / project).rglob("*") if found.name == name)
        settings = file if file.suffix != ".json" else PROJECTS / project / "lora-sft.yaml"
        convert_file(folder / settings.relative_to(PROJECTS / project))

    return Kind(make, f"**/{name}", read, is_text=name.endswith(".json"))


def _windows(folder: Path) -> KeptWindows:
    return KeptWindows(folder, [], "key", 8)


def _make_windows(folder: Path) -> None:
    (folder / ".qlora_fsdp").touch()
    lengths, tokens = np.array([3, 2]), [np.array([1, -3, -4], np.int32), np.array([5, -7], np.int32)]
    table = ShareTable(np.array([0, 1]), lengths, np.array([2, 1], np.int32), (), 6, "")
    _windows(folder).write(PLACE, Share(table, tokens), PLACE.positions)


def _read_windows(folder: Path) -> None:
    file = folder / WINDOWS_FOLDER / _name(PLACE)
    with suppress(SafetensorError, ValueError, TypeError, KeyError):
        arrays = load_arrays(file)
        arrays.pop("sha256", None)
        save_arrays(arrays | {"sha256": _digest(arrays)}, file)
    if _windows(folder).read(PLACE) is None:
        raise UserError("it is made anew")


def _make_tensors(folder: Path) -> None:
    """The state of an optimizer, as a checkpoint has it."""
    whole = {"state.exp_avg": torch.zeros(6, 4), "state.step": torch.zeros(1)}
    save_arrays({name: tensor.numpy() for name, tensor in whole.items()}, folder / rank_file(0))
    write_index(folder, whole, [{name: (0, len(tensor)) for name, tensor in whole.items()}])


def _read_tensors(folder: Path) -> None:
    try:
        found = read_index(folder, {rank_file(0)})
        for name, shape in (("state.exp_avg", (6, 4)), ("state.step", (1,))):
            if name not in found or found[name].shape != shape:
                raise BadFile("it is another model's")
            read_rows(found[name], torch.empty(shape), 0)
    except BadFile as error:
        raise UserError(str(error)) from error


def _make_prompts(folder: Path) -> None:
    chat = [{"role": "user", "content": "What is 1 + 1?"}]
    rows = [{"prompt": "a", "solution": "b"}, {"prompt": chat, "answer": 2, "tools": []}, {"prompt": "c"}]
    write_lines(folder / "rows.jsonl", rows)


def _read_prompts(folder: Path) -> None:
    data = DataConfig(path=str(folder / "rows.jsonl"), format=DataFormat.auto)
    spec = DataSpec.of(Config(data=data, task=TaskConfig(name=TaskName.grpo)))
    prepare_questions(spec, byte_tokenizer(), one_process(), 259)


def _make_answers(folder: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": chat, "chosen": [{"role": "assistant", "content": "b"}], "rejected": "c"},
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "a", "responses": ["b", "c"], "scores": [1, 2]},
    ]
    write_lines(folder / "rows.jsonl", rows)


def _read_answers(folder: Path) -> None:
    for line in (folder / "rows.jsonl").read_bytes().splitlines():
        for is_paired in (True, False):
            with suppress(BadRow):
                read_answers(parse_row(line), is_paired, {})


QUESTIONS = [
    Question(tokens=[1], prompt="a", columns={}, place="rows.jsonl:1", teacher_tokens=[1, 2], given=[3, 4, 5]),
    Question(tokens=[2], prompt="b", columns={}, place="rows.jsonl:2", teacher_tokens=[2, 2], given=[6, 7]),
]


def _score_writer(folder: Path) -> ScoreWriter:
    identity = {"tokenizer": digest_tokens(byte_tokenizer()), "temperature": 1.0}
    return ScoreWriter(folder / "scores", identity, QUESTIONS)


def make_scores(folder: Path) -> None:
    """Two files of a row each, as `qlora-fsdp score` writes them."""
    writer = _score_writer(folder)
    writer.open()
    for number, question in enumerate(QUESTIONS):
        assert question.given is not None
        ids = np.tile(np.arange(4, dtype=np.int32), (len(question.given), 1))
        log_probs = np.full((len(question.given), 5), np.log(0.2), dtype=np.float32)
        writer.add(number, [RowScores(ids, log_probs, log_probs[:, 0].copy())])


def _use_scores(folder: Path) -> None:
    """As a run with distill.teacher_scores does."""
    scores = TeacherScores(folder / "scores", byte_tokenizer(), temperature=1.0)
    scores.check(QUESTIONS)
    joined = join_scores([scores.of(question) for question in QUESTIONS])
    assert joined.ids.shape == (5, 4) and joined.log_probs.shape == (5, 5) and joined.given.shape == (5,)
    assert joined.log_probs.isfinite().all()


def _go_on_with_scores(folder: Path) -> None:
    """As `qlora-fsdp score` does where it was broken off."""
    assert 0 <= _score_writer(folder).open() <= 2


REPORTED = ("summary.json", "metrics.jsonl", "environment.json", "generations.jsonl", "sweep.json", "config.yaml")
CONVERTED = {"axolotl": "qlora-alpaca.yml", "llama_factory": "lora-sft.yaml", "trl": "sft-qlora.yaml"}
CONVERTED |= {"accelerate": "fsdp-qlora.yaml"}
COMPRESSED = ("int4", "mxfp4", "nvfp4")


def _make_compressed(folder: Path, name: str) -> None:
    make_checkpoint("llama", folder / "source", torch.float32, max_shard_size="1GB")
    make_compressed(folder / "source", folder / name, name)
    shutil.rmtree(folder / "source")


def _load_compressed(folder: Path, name: str) -> None:
    load_model(folder / name)


def _compressed(name: str, file: str, is_text: bool) -> Kind:
    """A file of a checkpoint in one of compressed-tensors' formats."""
    make = partial(_make_compressed, name=name)
    return Kind(make, f"{name}/{file}", partial(_load_compressed, name=name), is_text=is_text)


def _load_fp8(folder: Path) -> None:
    load_model(folder / "fp8")


KINDS_OF_RECORDS: dict[str, Kind] = {
    **{f"report's {name}": Kind(_make_run, name, _report) for name in REPORTED},
    "fp8 safetensors": Kind(_make_fp8, "fp8/model.safetensors", _load_fp8, is_text=False),
    "fp8's config.json": Kind(_make_fp8, "fp8/config.json", _load_fp8),
    **{f"{name} safetensors": _compressed(name, "model.safetensors", is_text=False) for name in COMPRESSED},
    **{f"{name}'s config.json": _compressed(name, "config.json", is_text=True) for name in COMPRESSED},
    "rows of a report": Kind(_make_report_rows, "rows.safetensors", _read_report_rows, is_text=False),
    "teacher's settings": Kind(_make_second_adapter, "adapter/adapter_config.json", _use_second_adapter),
    "teacher's weights": Kind(_make_second_adapter, f"adapter/{ADAPTER_WEIGHTS}", _use_second_adapter, is_text=False),
    "predictions": Kind(_make_predictions, "out.jsonl.part", _read_predictions),
    "merge.json": Kind(_make_merge, "merge.json", _read_merge),
    **{f"{project}'s settings": _converter(project, name) for project, name in CONVERTED.items()},
    "dataset_info.json": _converter("llama_factory", "dataset_info.json"),
    "kept window": Kind(_make_windows, f"{WINDOWS_FOLDER}/*.safetensors", _read_windows, is_text=False),
    "index of an optimizer": Kind(_make_tensors, "index.json", _read_tensors),
    "state of an optimizer": Kind(_make_tensors, rank_file(0), _read_tensors, is_text=False),
    "scores of a teacher": Kind(make_scores, "scores/00000001.safetensors", _use_scores, is_text=False),
    "scores.json": Kind(make_scores, f"scores/{SCORES_HEADER}", _use_scores),
    "scores.json of a command that goes on": Kind(make_scores, f"scores/{SCORES_HEADER}", _go_on_with_scores),
    "scores that a command goes on with": Kind(
        make_scores, "scores/00000001.safetensors", _go_on_with_scores, is_text=False
    ),
    "prompts": Kind(_make_prompts, "rows.jsonl", _read_prompts),
    "answers": Kind(_make_answers, "rows.jsonl", _read_answers),
}
