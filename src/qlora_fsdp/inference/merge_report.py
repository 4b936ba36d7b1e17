"""What a merged model keeps of what its adapter has learned: base, adapter as trained and result on the same few rows.

Base and adapter are loaded as training had them, the result by stock transformers from the files that were written, as
any other program would load it. Of the gain in loss that the adapter makes over its base, the result keeps a share,
which is near 1 where the merge was done well; the KL divergence says how far its predictions are from those that were
trained, whatever the loss does.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from qlora_fsdp.common.errors import DataError
from qlora_fsdp.common.text import first_line, format_table, plural, show_bytes
from qlora_fsdp.config.reading.commands import read_report_digest
from qlora_fsdp.config.schema import QuantConfig, TaskConfig, TaskName
from qlora_fsdp.config.specs import DataSpec, TaskSpec
from qlora_fsdp.data.report_rows import MAX_TOKENS, ReportRows, choose_rows, read_report_rows
from qlora_fsdp.data.run_data import prepare_data
from qlora_fsdp.data.tokenize import TokenRow
from qlora_fsdp.inference.merge_formats import FORMATS
from qlora_fsdp.inference.trained import run_folder_of
from qlora_fsdp.model.adapters.model_card import auto_class_of
from qlora_fsdp.model.assemble import AssembledModel
from qlora_fsdp.records.run_state import REPORT_ROWS_FILE
from qlora_fsdp.runtime.host_memory import available_bytes
from qlora_fsdp.runtime.processes import Processes

ENOUGH = 0.9  # of the gain
MIN_GAIN = 0.01  # nats a token: of less no share is computed, as a few rows don't show it
MAX_SECONDS = 60.0  # that the rows take in the first model; the others get the rows that were done by then
LoadForm = Callable[[torch.dtype, torch.device], nn.Module]
# Of the memory of a model in 16 bits, by the format of its base
FORMAT_SHARES = {
    None: 1.0,
    "nf4": 0.4,
    "fp4": 0.4,
    "int4": 0.4,
    "mxfp4": 0.4,
    "nvfp4": 0.4,
    "int8": 0.6,
    "fp8": 0.6,
}
SPARE = 1.1  # of the memory of a model, for what computing takes
# The types of GGUF files that round less than another
FINER_GGUF = {"q4_0": ("q8_0", "f16"), "q8_0": ("f16", "bf16"), "f16": ("f32",), "bf16": ("f32",), "f32": ()}
FINER = {"int4": "fp8", "nvfp4": "fp8", "mxfp4": "fp8"}  # formats that servers read too, and that round less
NO_ROOM = "What it learned is finer than this precision holds: serve the adapter beside its base instead."
NAMES = {"base": "base without the adapter", "trained": "adapter as trained"}


@dataclass(frozen=True)
class ModelFigures:
    """What one model predicts on the rows: means of a token, in nats.

    Attributes:
        loss: of the targets.
        kept: the share of the gain in loss from the base to the adapter as trained; None where there is hardly a gain.
        kl_mean: KL(trained || this model).
        kl_max: the largest of a token.
    """

    loss: float
    kept: float | None
    kl_mean: float
    kl_max: float


@dataclass(frozen=True)
class MergeReport:
    """What is reported of a merge, as merge_report.json has it.

    Attributes:
        rows: what the rows are: held-out rows of the run, rows that it was trained on, or a file's.
        num_rows: how many were computed.
        num_target_tokens: predicted tokens in them.
        models: figures of the `base` without the adapter, of the adapter as `trained` on it, and of every form that was
            written, by their names.
        failed: why a form could not be compared, by its name.
        seconds: that the report took.
    """

    rows: str
    num_rows: int
    num_target_tokens: int
    models: Mapping[str, ModelFigures]
    failed: Mapping[str, str]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The figures by their names."""
        return asdict(self)

    @property
    def written(self) -> dict[str, ModelFigures]:
        """The forms that were written, without base and adapter."""
        return {name: figures for name, figures in self.models.items() if name not in ("base", "trained")}

    def table(self) -> list[dict[str, str]]:
        """The figures as they are shown, a model a row."""
        return [
            {
                "model": NAMES.get(name, name),
                "loss": f"{figures.loss:.4f}",
                "of the gain": "-" if figures.kept is None else f"{figures.kept:.1%}",
                "KL a token": f"{figures.kl_mean:.5f}",
            }
            for name, figures in self.models.items()
        ]


def find_kept_rows(adapter: str, vocab_size: int) -> tuple[ReportRows, str]:
    """The rows that an adapter's run has kept beside its folder, and what they are.

    Raises:
        DataError: there are none, or they are not those of this adapter.
    """
    digest = read_report_digest(adapter)
    if digest is None:
        raise DataError("The adapter's run has kept no rows.")
    kept = read_report_rows(run_folder_of(adapter) / REPORT_ROWS_FILE, digest, vocab_size)
    return kept, "held-out rows of the run" if kept.are_held_out else "rows that the run was trained on"


def read_rows_of_file(
    path: str, num_rows: int, spec: DataSpec, trained: AssembledModel, processes: Processes
) -> tuple[ReportRows, str]:
    """The rows of a file of the user's, and what they are.

    Args:
        path: the file, which `spec` names too.
        num_rows: how many of its rows, at most.
        spec: how it is read.
        trained: the model, whose tokenizer knows the new tokens.
        processes: one.

    Raises:
        DataError: the file can't be used.
    """
    as_texts = replace(
        spec,
        task=TaskSpec(TaskConfig(TaskName.causal_lm)),  # the rows are text, also where the adapter learned preferences
        packs_rows=False,
        max_length=min(spec.max_length, MAX_TOKENS),
    )
    data = prepare_data(as_texts, trained.tokenizer, processes, trained.model.vocab_size, for_training=False).train
    return ReportRows(choose_rows(data, num_rows), are_held_out=False), f"rows of {path}"


def find_shortage(
    merged: AssembledModel, out: Path, quant: QuantConfig, device: torch.device, decompresses: bool
) -> str | None:
    """Why the models of a report can't be loaded, one after the other; None if they can.

    Args:
        merged: base and adapter on meta.
        out: folder of the merged model's files.
        quant: how the base was quantized in training.
        device: where the models compute.
        decompresses: whether transformers computes with the merged model's weights in full precision.
    """
    share = 1.0 if decompresses else FORMAT_SHARES[quant.base_format]
    of_base = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in merged.files.tensors.values())
    in_files = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    per_byte = merged.dtype.itemsize / 2  # files have 16 bits a weight as a rule
    needed = int(max(of_base * share, in_files) * per_byte * SPARE)
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed <= free:
        return None
    return (
        f"{show_bytes(needed)} of memory would be needed for it on the {device.type}, and {show_bytes(free)} are free"
    )


def gguf_bytes(merged: AssembledModel, device: torch.device) -> int:
    """Host memory that transformers takes to load a GGUF file: all its weights at once, beside those of the model.

    Args:
        merged: base and adapter on meta.
        device: where the model computes.
    """
    num_weights = sum(math.prod(tensor.shape) for tensor in merged.files.tensors.values())
    num_copies = 2 if device.type == "cpu" else 1
    return num_weights * merged.dtype.itemsize * num_copies


def make_report(
    load_trained: Callable[[], AssembledModel],
    rows: ReportRows,
    what: str,
    forms: Mapping[str, LoadForm],
    device: torch.device,
    host_bytes: Mapping[str, int],
) -> MergeReport:
    """Load the models one after the other and compare their predictions.

    Args:
        load_trained: loads the adapter on its base as both were in training.
        rows: on which they are compared.
        what: the rows are.
        forms: what was written, by its name: each loads it by stock libraries, in this dtype and on this device.
        device: where the models compute.
        host_bytes: what loading takes of the host's memory, for forms that are left out where that is short.
    """
    started = time.perf_counter()
    assembled = load_trained()
    wrapped = assembled.model.model
    dtype = assembled.dtype
    as_trained = _predict(wrapped, rows.rows, device, time.perf_counter() + MAX_SECONDS)
    done = rows.rows[: len(as_trained)]
    targets = [_targets_of(row) for row in done]
    with wrapped.disable_adapter():
        as_base = _predict(wrapped, done, device)
    loss_base = _loss(as_base, targets)
    loss_trained = _loss(as_trained, targets)
    gain = loss_base - loss_trained

    def compare(predicted: Sequence[Tensor]) -> ModelFigures:
        loss = _loss(predicted, targets)
        kept = (loss_base - loss) / gain if gain >= MIN_GAIN else None
        divergences = _divergences(as_trained, predicted)
        return ModelFigures(loss, kept, divergences.mean().item(), divergences.max().item())

    models = {"base": compare(as_base), "trained": compare(as_trained)}
    del assembled, wrapped, as_base
    _free()
    failed = {}
    of_predictions = sum(each.nbytes for each in as_trained)
    for name, load in forms.items():
        if name in host_bytes:
            needed = host_bytes[name] + of_predictions
            free = available_bytes()
            if needed > free:
                failed[name] = (
                    f"{show_bytes(needed)} of host memory would be needed for it, and {show_bytes(free)} are free"
                )
                continue
        try:
            model = load(dtype, device).eval()
            models[name] = compare(_predict(model, done, device))
            del model
        except Exception as error:  # of the stock libraries, which may not know this model in this form
            failed[name] = first_line(error)
        _free()
    num_targets = sum(len(each) for each in targets)
    return MergeReport(what, len(done), num_targets, models, failed, round(time.perf_counter() - started, 1))


def load_stock(folder: Path, dtype: torch.dtype, device: torch.device, trusts_code: bool, **options: Any) -> nn.Module:
    """A model as stock transformers loads it from a folder.

    Args:
        folder: of the model.
        dtype: in which it computes.
        device: where.
        trusts_code: whether code that comes with the model is run.
        options: others of `from_pretrained`.
    """
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code, **options)
        auto_class = getattr(transformers, auto_class_of(config))
        model: nn.Module = auto_class.from_pretrained(
            folder, dtype=dtype, device_map={"": str(device)}, trust_remote_code=trusts_code, **options
        )
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    return model


def _targets_of(row: TokenRow) -> Tensor:
    tokens, is_target = row
    return torch.from_numpy(tokens[1:][is_target[1:]].astype("int64"))


@torch.inference_mode()
def _predict(
    model: nn.Module, rows: Sequence[TokenRow], device: torch.device, deadline: float = math.inf
) -> list[Tensor]:
    """For each row the log-probabilities of its targets' places, float32 [num_targets, vocabulary] on the CPU.

    Rows that would begin behind the deadline are left out, but for the first.
    """
    found: list[Tensor] = []
    for tokens, is_target in rows:
        if found and time.perf_counter() > deadline:
            break
        ids = torch.from_numpy(tokens.astype("int64"))[None].to(device)
        mask = torch.from_numpy(is_target[1:].copy())
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        found.append(logits[mask.to(logits.device)].float().log_softmax(-1).cpu())
    return found


def _loss(predicted: Sequence[Tensor], targets: Sequence[Tensor]) -> float:
    """The mean of all targets."""
    losses = [F.nll_loss(each, wanted, reduction="none") for each, wanted in zip(predicted, targets, strict=True)]
    return torch.cat(losses).double().mean().item()


def _divergences(trained: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """KL(trained || other) of each target, float64 [num_targets]. Tables of either may be padded."""
    found = []
    for old, new in zip(trained, other, strict=True):
        width = min(old.shape[-1], new.shape[-1])
        pair = (new[:, :width].double(), old[:, :width].double())
        terms = F.kl_div(*pair, log_target=True, reduction="none")
        is_impossible = pair[1] == -math.inf  # in the trained model: 0 times infinity, which is 0 here, would be NaN
        found.append(terms.masked_fill(is_impossible, 0).sum(-1))
    return torch.cat(found)


def _free() -> None:
    """Let go of a model that was deleted, before the next one is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def describe_report(report: MergeReport) -> str:
    """The lines that the log has of a report."""
    tokens = plural(report.num_target_tokens, "predicted token")
    head = f"Report on {report.num_rows} {report.rows}, {tokens}, in {report.seconds:.0f} s:"
    lines = [head, *(f"  {line}" for line in format_table(report.table()).splitlines())]
    lines += [f"Note: transformers can't load {name} here: {reason}" for name, reason in report.failed.items()]
    return "\n".join(lines)


def advise(
    name: str,
    figures: ModelFigures,
    base: str,
    format: str | None,
    trained_format: str | None,
    corrects_rounding: bool = False,
) -> str | None:
    """A warning with what to do, where a merge keeps too little of the gain; None where it keeps enough.

    Args:
        name: of the form that was written: merged, or a GGUF file's.
        figures: of it.
        base: as the setting says, full or dequantized.
        format: in which safetensors have their weights; None for the precision of the base's files.
        trained_format: that the adapter was trained on; None for none.
        corrects_rounding: whether the adapter corrects that format's rounding, so that it goes with base=dequantized
            alone.
    """
    if figures.kept is None or figures.kept >= ENOUGH:
        return None
    if name.endswith(".gguf"):
        fix = _advise_gguf(name, base, trained_format)
    else:
        fix = _advise_merged(base, format, trained_format, corrects_rounding)
    return f"{name} keeps {figures.kept:.1%} of what the adapter gains over its base. {fix}"


def _advise_merged(base: str, format: str | None, trained_format: str | None, corrects_rounding: bool) -> str:
    """What to set instead, of safetensors that keep too little; the arguments are those of `advise`."""
    if trained_format is None and format is None:
        return NO_ROOM
    if trained_format is None:
        finer = f", or set quantize={FINER[format]}, which rounds less" if format in FINER else ""
        return f"The precision of the base's files has what was trained: leave quantize out{finer}."
    if format == trained_format and base == "full":
        return f"Try base=dequantized quantize={format}, which merges into the very weights that were trained on."
    if format == trained_format and corrects_rounding:
        return "Leave quantize out: that gives what was trained, in the precision of the base's files."
    if format == trained_format:
        return "Try base=full, whose rounding comes out otherwise, or leave quantize out."
    changes = []
    if base == "full":
        changes.append("set base=dequantized")
    if format is not None:
        changes.append("leave quantize out")
    if not changes:
        return NO_ROOM
    what = " and ".join(changes)
    fix = f"{what[0].upper()}{what[1:]}: that gives what was trained, in the precision of the base's files."
    if format in FINER:
        fix += f" Or set quantize={FINER[format]}, which rounds less."
    if trained_format in FORMATS:
        fix += f" Or set quantize={trained_format}, the format that it was trained on, without gguf."
    return fix


def _advise_gguf(name: str, base: str, trained_format: str | None) -> str:
    """What to use instead of a GGUF file that keeps too little; the arguments are those of `advise`."""
    type_name = name.removesuffix(".gguf").rpartition("-")[2].lower()
    finer = FINER_GGUF[type_name]
    fixes = []
    if finer:
        others = " or ".join(f"gguf={each}" for each in finer)
        fixes.append(f"Use a file of {others} instead, which rounds less.")
    if base == "full" and trained_format is not None:
        fixes.append("base=dequantized merges onto the weights that the adapter was trained on.")
    return " ".join(fixes or [NO_ROOM])
