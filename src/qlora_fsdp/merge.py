"""`qlora-fsdp merge`: make one model of base and adapter, and report how its predictions changed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import Problem, refuse
from qlora_fsdp.common.files import write_json
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.common.text import plural, show_bytes
from qlora_fsdp.config.reading.commands import BaseAndAdapterSettings, read_trained_on
from qlora_fsdp.config.schema import (
    Config,
    DataFormat,
    EmbeddingStorage,
    QuantConfig,
    TaskConfig,
    TaskName,
    Weights,
)
from qlora_fsdp.config.settings import show
from qlora_fsdp.config.specs import DataSpec, TaskSpec
from qlora_fsdp.records.run_summary import ask, trust
from qlora_fsdp.runtime.run_command import log, print_result, run_command

if TYPE_CHECKING:
    from torch import Tensor

    from qlora_fsdp.runtime.processes import Processes

USAGE = """
One model out of a base and its adapter: safetensors files, config and tokenizer, for any program that loads models.

usage: qlora-fsdp merge adapter=DIR out=DIR [setting=value ...]

  adapter=DIR         the adapter's folder, which also knows its base model
  out=DIR             a new folder, or one in which the same merge was cut off, which is finished
  base=full           onto the base's own weights (default). base=dequantized: onto the quantized ones that the adapter
                      was trained on
  quantize=nf4        write the result quantized, as transformers and bitsandbytes load it (nf4 or fp4). With
                      base=dequantized and the format of training, changed weights are rounded up or down at random:
                      to the nearest, the rounding would take the adapter away
  report_data=FILE    rows on which the merged model is compared with base and adapter as trained: loss, KL divergence
  report_rows=8       how many of them
  other_base=true     use the adapter on a base with other weights than those that it was trained on (default: false)
  write=adapter       instead of a model the adapter alone, as vLLM reads it: with the names that layers have in the
                      base's files, one adapter for each expert of a mixture, and one scaling for all layers

examples:
  qlora-fsdp merge adapter=outputs/run/adapter out=merged report_data=held_out.jsonl
  qlora-fsdp merge adapter=outputs/run/adapter out=merged-nf4 quantize=nf4
"""

MAX_REPORT_TOKENS = 512  # per row, because the logits of all rows are held at once


@dataclass
class MergeSettings(BaseAndAdapterSettings):
    """Settings of `merge`, as its --help says."""

    out: str | None = None
    base: str = "full"
    quantize: str | None = None
    report_data: str | None = None
    report_rows: int = 8
    write: str = "model"


def merge(settings: MergeSettings, config: Config, processes: Processes) -> None:
    """Check the settings, merge, and compare the merged model with the trained one."""
    _check(settings, DataSpec.of(config), config.quant, config.model.weights, processes.num_ranks)
    assert settings.adapter is not None and settings.out is not None
    with quick_imports():
        from qlora_fsdp.inference.export_adapter import export_adapter
        from qlora_fsdp.inference.merge_files import merge_files, merging_to
        from qlora_fsdp.inference.merge_weights import Merge
        from qlora_fsdp.inference.trained import assemble_trained

    built_as = config
    if settings.base == "full":  # whatever format the adapter was trained on
        # int8, which rows of any length can have, only says which layers are quantized: `takes_codes` has the last word
        names = settings.quantize is not None
        quant = replace(config.quant, load_in_4bit=False, load_in_8bit=names, embeddings=EmbeddingStorage.none)
        built_as = replace(config, quant=quant)
    adapter, out = Path(settings.adapter).expanduser(), Path(settings.out).expanduser()
    if settings.write == "adapter":
        trained = assemble_trained(config, settings, processes)
        with merging_to(out):
            renamed = export_adapter(trained, adapter, out)
        log.info(_describe_export(adapter, out, renamed))
        return
    is_there = (out / "config.json").is_file()  # which a merge writes last
    merged = Merge(
        assemble_trained(built_as, settings, processes),
        adapter,
        out,
        settings.base == "dequantized",
        cast(Any, settings.quantize),  # `_check` has refused anything else
        processes.device,
    )
    merge_files(merged)
    if merged.rounding == "random":
        log.info(
            f"Weights of the dequantized base lie on the grid of {settings.quantize}. Those that the adapter changes "
            "were rounded to it at random, up or down in proportion, with a fixed seed; to the nearest, the rounding "
            "would have taken most of the adapter away."
        )
    data, trusts_code = DataSpec.of(config), config.model.trust_remote_code
    log.info(_describe_end(out, is_there, data, trusts_code, read_trained_on(settings.adapter)))
    if settings.report_data is not None:
        rows: dict[str, Any] = {"data.path": settings.report_data, "data.mix": {}, "data.max_rows": None}
        report = compare(settings, config.with_values(rows), processes)
        with merging_to(out):
            write_json(out / "merge_report.json", report)
        print_result(json.dumps(report))


def _describe_export(adapter: Path, out: Path, renamed: dict[str, str]) -> str:
    """Describe an adapter that was written for servers, and which of the two is whose."""
    lines = [f"Written: {out}, an adapter as vLLM reads it, by --lora-modules NAME={out}."]
    if renamed:
        name, other = next(iter(renamed.items()))
        lines.append(
            f"Its layers have the names of the base's files, by which vLLM knows them: {other}, where PEFT has {name}. "
            f"For PEFT and qlora-fsdp is {adapter}."
        )
    return "\n".join(lines)


def _describe_end(out: Path, was_there: bool, data: DataSpec, trusts_code: bool, trained_on: DataFormat | None) -> str:
    """Describe the result, and what to type next with a model that writes text.

    The model's folder does not say how prompts were written in training, as the adapter's does.
    """
    files = list(out.glob("*.safetensors"))
    size = show_bytes(sum(file.stat().st_size for file in files))
    what = f"{plural(len(files), 'file')} of weights, {size}"
    if was_there:
        return f"{out} already holds this very merge ({what}). To merge once more, remove it or set another out."
    merged = f"Merged: {out} ({what}). It is a model as any other"
    if not data.task.is_causal:
        return f"{merged}."
    given = f"model.path={shlex.quote(str(out))}{trust(trusts_code)}"
    if trained_on not in (None, DataFormat.messages):
        note = f"the adapter was trained on {trained_on.value} rows; prompts are to be written as these have them"
        return f'{merged}:\n  qlora-fsdp generate {given} raw=true prompt="..."\nNote: {note}.'
    lines = [f"{merged}:", f"  {ask(given, out)}"]
    if data.settings.system_prompt:
        note = "conversations began with a system prompt in training, which the model does not have by itself"
        lines.append(f"Note: {note}; data.system_prompt sets it: {data.settings.system_prompt}")
    if data.settings.template_arguments:
        arguments = show("data.template_arguments", data.settings.template_arguments)
        lines.append(
            f"Note: the chat template was given arguments in training, which the model does not have by itself: "
            f"{arguments}, or a server's chat_template_kwargs"
        )
    return "\n".join(lines)


def compare(settings: MergeSettings, config: Config, processes: Processes) -> dict[str, Any]:
    """Losses of the trained and the merged model on a few rows, and KL(trained || merged) per token, in nats."""
    import torch
    from torch.nn import functional as F

    trained = _log_probabilities(config, settings, settings.report_rows, processes)
    as_merged = config.with_values(_values_of_merged(settings.out))
    merged = _log_probabilities(as_merged, BaseAndAdapterSettings(), settings.report_rows, processes)
    divergences, losses = [], []
    for (old, targets), (new, _) in zip(trained, merged, strict=True):
        divergences.append(F.kl_div(new, old, log_target=True, reduction="none").sum(-1))
        losses.append(torch.stack([F.nll_loss(each, targets, reduction="none") for each in (old, new)]))
    kl, loss = torch.cat(divergences).double(), torch.cat(losses, 1).double().mean(1)
    return {
        "base": settings.base,
        "quantize": settings.quantize,
        "num_rows": len(trained),
        "num_target_tokens": len(kl),
        "loss_trained": loss[0].item(),
        "loss_merged": loss[1].item(),
        "kl_mean": kl.mean().item(),
        "kl_max": kl.max().item(),
    }


def _values_of_merged(out: str | None) -> dict[str, Any]:
    """What settings are for the merged model: it is in full precision, unless its own config.json says otherwise."""
    values: dict[str, Any] = {
        "task.name": TaskName.causal_lm,
        "model.path": out,
        "quant.load_in_4bit": False,
        "quant.load_in_8bit": False,
        "quant.embeddings": EmbeddingStorage.none,
    }
    if (Path(out or "").expanduser() / "tokenizer_config.json").is_file():  # which has the new tokens
        values |= {"model.tokenizer_path": None, "tokenizer.add_tokens": [], "tokenizer.add_special_tokens": []}
    return values


def _log_probabilities(
    config: Config, settings: BaseAndAdapterSettings, num_rows: int, processes: Processes
) -> list[tuple[Tensor, Tensor]]:
    """For each row the log-probabilities [num_targets, vocabulary] (float32, CPU) and the targets [num_targets]."""
    import torch

    from qlora_fsdp.data.run_data import prepare_data
    from qlora_fsdp.inference.trained import load_trained

    trained = load_trained(config, settings, processes, generates=True)
    spec = replace(
        DataSpec.of(config),
        task=TaskSpec(TaskConfig(TaskName.causal_lm)),  # the rows are text, also where the adapter learned preferences
        packs_rows=False,
        max_length=min(config.training.max_length, MAX_REPORT_TOKENS),
    )
    vocab_size = trained.model.vocab_size
    data = prepare_data(spec, trained.tokenizer, processes, vocab_size, for_training=False).train
    found = []
    for number in range(min(num_rows, len(data))):
        ((tokens, is_target),) = data.rows_of(number)
        ids, mask = torch.from_numpy(tokens.astype("int64")), torch.from_numpy(is_target[1:].copy())
        with torch.inference_mode():
            logits = trained.model.base(input_ids=ids[None].to(processes.device), use_cache=False).logits[0, :-1]
        found.append((logits[mask.to(logits.device)].float().log_softmax(-1).cpu(), ids[1:][mask]))
    return found


def _check(settings: MergeSettings, data: DataSpec, quant: QuantConfig, weights: Weights, num_ranks: int) -> None:
    problems = []
    if settings.adapter is None:
        problems.append(Problem("adapter", "is not set.", "Set adapter to the folder that training wrote."))
    if settings.out is None:
        problems.append(Problem("out", "is not set.", "Set out to a new folder."))
    elif Path(settings.out).expanduser().is_file():
        problems.append(Problem(f"out={settings.out}", "is a file.", "Set out to a new folder."))
    if settings.base not in ("full", "dequantized"):
        problems.append(Problem(f"base={settings.base}", "is neither full nor dequantized.", "Set one of them."))
    if settings.write not in ("model", "adapter"):
        problems.append(Problem(f"write={settings.write}", "is neither model nor adapter.", "Set one of them."))
    default = MergeSettings()
    of_model = {name: getattr(settings, name) for name in ("base", "quantize", "report_data")}
    for name, value in of_model.items() if settings.write == "adapter" else ():
        if value != getattr(default, name):
            reason = "is about a merged model, and write=adapter makes none."
            problems.append(Problem(f"{name}={value}", reason, f"Leave {name} out, or set write=model."))
    if settings.quantize not in (None, "nf4", "fp4"):
        problems.append(Problem(f"quantize={settings.quantize}", "is neither nf4 nor fp4.", "Set one of them."))
    if settings.report_rows < 1:
        problems.append(Problem(f"report_rows={settings.report_rows}", "must be at least 1.", "Set report_rows=8."))
    rows = settings.report_data
    if rows is not None and not path_exists(rows):
        problems.append(Problem(f"report_data={rows}", "does not exist.", "Set report_data to a file of rows."))
    if rows is not None and not data.task.is_causal:
        reason = "compares next-token predictions, which a classifier has none of."
        problems.append(Problem(f"report_data={rows}", reason, "Leave report_data out."))
    elif rows is not None and path_exists(rows) and _are_pairs(rows, data):
        reason = "has pairs of answers, and the comparison takes one text from each row."
        fix = "Set data.columns={completion: chosen}, or {messages: chosen} where these are whole chats."
        problems.append(Problem(f"report_data={rows}", reason, fix))
    if settings.base == "dequantized" and not (quant.load_in_4bit or quant.load_in_8bit):
        problems.append(Problem("base=dequantized", "needs a quantized base.", "Set base=full."))
    if weights is Weights.random:
        fix = "Set model.weights=checkpoint and model.path to the model, if that is what the adapter was trained on."
        problems.append(Problem(show("model.weights", weights), "has no files to merge into.", fix))
    if num_ranks > 1:
        problems.append(Problem("--num_processes", "must be 1: a merge reads and writes files.", "Start one process."))
    refuse(problems)


def _are_pairs(rows: str, data: DataSpec) -> bool:
    """Whether the rows are pairs of answers, and no texts."""
    from qlora_fsdp.data.form import find_first

    data = replace(data, settings=replace(data.settings, path=rows, mix={}))
    as_texts = replace(data, task=TaskSpec(TaskConfig(TaskName.causal_lm)))
    as_pairs = replace(data, task=TaskSpec(TaskConfig(TaskName.preference)))
    return find_first(as_texts) is None and find_first(as_pairs) is not None


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    return run_command(argv, MergeSettings, USAGE, merge, optional=["data.path", "reward.functions"])


if __name__ == "__main__":
    end_process(main())
