"""`qlora-fsdp merge`: make one model of base and adapter, and report how its predictions changed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    from qlora_fsdp.common.startup import begin

    begin()

from qlora_fsdp.common.errors import DataError, Interrupted, Problem, UserError, refuse
from qlora_fsdp.common.files import write_atomically, write_json
from qlora_fsdp.common.hub import path_exists
from qlora_fsdp.common.sizes import GROUP_SIZES
from qlora_fsdp.common.startup import end_process, quick_imports
from qlora_fsdp.common.text import plural, show_bytes
from qlora_fsdp.config.reading.commands import BaseAndAdapterSettings, read_corrected_format, read_trained_on
from qlora_fsdp.config.schema import (
    CompressedFormat,
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
    import torch
    from torch import nn

    from qlora_fsdp.inference.merge_report import LoadForm, MergeReport
    from qlora_fsdp.inference.merge_weights import Merge
    from qlora_fsdp.model.assemble import AssembledModel
    from qlora_fsdp.runtime.processes import Processes

USAGE = """
One model out of a base and its adapter: safetensors files, config and tokenizer, for any program that loads models.

usage: qlora-fsdp merge adapter=DIR out=DIR [setting=value ...]

  adapter=DIR         the adapter's folder, which also knows its base model
  out=DIR             a new folder, or one in which the same merge was cut off, which is finished
  base=full           onto the base's own weights (default). base=dequantized: onto the quantized ones that the adapter
                      was trained on, as adapters need that started with lora.init_lora_weights=loftq
  quantize=nf4        write the linear layers quantized: nf4 or fp4, as transformers and bitsandbytes load them; int4,
                      fp8, nvfp4 or mxfp4, as vLLM and transformers do with the package compressed-tensors. Heads and
                      embeddings stay as they are. Where the base lies on the grid of the format, as with
                      base=dequantized and the format of training, changed weights are rounded up or down at random:
                      to the nearest, the rounding would take the adapter away
  group_size=128      of quantize=int4: weights of a row that share a scale, 32, 64 or 128 (default: as the base was
                      quantized in training, or 32)
  report=false        don't compare the merged model with base and adapter as trained (default: true): the loss of
                      each, the share of the gain that is kept, and the KL divergence, on some held-out rows that the
                      run has kept beside the adapter
  report_data=FILE    on rows of your own
  report_rows=32      how many of them, at most
  other_base=true     use the adapter on a base with other weights than those that it was trained on (default: false)
  write=adapter       instead of a model the adapter alone, as vLLM reads it: with the names that layers have in the
                      base's files, one adapter for each expert of a mixture, and one scaling for all layers
  gguf=q8_0,q4_0      beside the model GGUF files of it (f32, f16, bf16, q8_0, q4_0), for llama.cpp, Ollama and LM
                      Studio, and Ollama's Modelfile; with write=adapter of the adapter alone, for llama.cpp's --lora
  llama_cpp=DIR       llama.cpp's folder, whose converter writes them; by default the one on the PATH

examples:
  qlora-fsdp merge adapter=outputs/run/adapter out=merged report_data=held_out.jsonl
  qlora-fsdp merge adapter=outputs/run/adapter out=merged-nf4 quantize=nf4
  qlora-fsdp merge adapter=outputs/run/adapter out=merged-fp8 quantize=fp8
"""

REPORT_FILE = "merge_report.json"
CARD_FILE = "README.md"
FAILED = "the comparison failed, as the log of the merge says."  # the card, which may be published, quotes no paths
MODELFILE = "Modelfile"
BASE_FILE = "base.gguf"  # beside an adapter, as its Modelfile names it: Ollama puts one on no other kind of file


@dataclass
class MergeSettings(BaseAndAdapterSettings):
    """Settings of `merge`, as its --help says."""

    out: str | None = None
    base: str = "full"
    quantize: str | None = None
    group_size: int | None = None
    report: bool = True
    report_data: str | None = None
    report_rows: int = 32
    write: str = "model"
    gguf: str | None = None
    llama_cpp: str | None = None

    @property
    def gguf_types(self) -> list[str]:
        """The types of the GGUF files that are wanted."""
        return [name.strip() for name in (self.gguf or "").split(",") if name.strip()]


def merge(settings: MergeSettings, config: Config, processes: Processes) -> None:
    """Check the settings, merge, and compare the merged model with the trained one."""
    corrected = read_corrected_format(settings.adapter)
    _check(settings, DataSpec.of(config), config.quant, config.model.weights, processes.num_ranks, corrected)
    assert settings.adapter is not None and settings.out is not None
    with quick_imports():
        from qlora_fsdp.inference.export_adapter import export_adapter
        from qlora_fsdp.inference.gguf_files import check_code, check_gguf_room
        from qlora_fsdp.inference.merge_files import merge_files, merging_to, plan_merge
        from qlora_fsdp.inference.merge_formats import make_format
        from qlora_fsdp.inference.merge_weights import Merge, find_parameter_changes
        from qlora_fsdp.inference.trained import assemble_trained

    built_as = config
    if settings.base == "full":  # whatever format the adapter was trained on
        # int8, which rows of any length can have, only says which layers are quantized: `takes_codes` has the last word
        names = settings.quantize is not None
        quant = replace(
            config.quant,
            load_in_4bit=False,
            load_in_8bit=names,
            compressed_tensors=CompressedFormat.none,
            embeddings=EmbeddingStorage.none,
        )
        built_as = replace(config, quant=quant)
    adapter, out = Path(settings.adapter).expanduser(), Path(settings.out).expanduser()
    if settings.write == "adapter":
        trained = assemble_trained(config, settings, processes)
        if settings.gguf_types:
            assert trained.files.folder is not None
            check_code(trained.files.folder, adapter, config.model.trust_remote_code)
            _write_adapter_gguf(settings, config.data.template_arguments, trained)
            return
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
        make_format(settings.quantize, _group_size(settings, config.quant)),
        processes.device,
    )
    if settings.gguf_types:
        assert merged.trained.files.folder is not None
        check_code(merged.trained.files.folder, adapter, config.model.trust_remote_code)
        changes = find_parameter_changes(merged.trained.model.base, adapter)
        check_gguf_room(out, settings.gguf_types, plan_merge(merged, changes))
    rounds_codes = merge_files(merged)
    if rounds_codes:
        log.info(
            f"Weights of the base lie on the grid of {settings.quantize}. Those that the adapter changes "
            "were rounded to it at random, up or down in proportion, with a fixed seed; to the nearest, the rounding "
            "would have taken most of the adapter away."
        )
    elif settings.quantize is None and merged.rounds_16_bits:
        log.info(
            "Weights that the adapter changes were rounded to 16 bits at random, up or down in proportion, with a "
            "fixed seed: to the nearest, most small changes would have been lost."
        )
    data, trusts_code = DataSpec.of(config), config.model.trust_remote_code
    log.info(_describe_end(out, is_there, data, trusts_code, read_trained_on(settings.adapter), settings.quantize))
    are_new = _write_gguf(settings, config.model.trust_remote_code, config.data.template_arguments, merged)
    if is_there and not are_new and (out / REPORT_FILE).is_file() and settings.report_data is None:
        log.info(f"Its report is in {out / REPORT_FILE}.")
        return
    _report(settings, config, merged, processes)


def _write_gguf(
    settings: MergeSettings, trusts_code: bool, template_arguments: Mapping[str, Any], merged: Merge
) -> bool:
    """Write the GGUF files that are wanted, and say how they are used. Returns whether any was not there yet."""
    from qlora_fsdp.inference.gguf_files import gguf_name, write_gguf_model
    from qlora_fsdp.inference.merge_files import merging_to
    from qlora_fsdp.inference.modelfile import end_marks, make_modelfile

    types = settings.gguf_types
    out = merged.out
    are_new = any(not (out / gguf_name("model", name)).is_file() for name in types)
    if not types:
        return False
    with merging_to(out):
        files = write_gguf_model(out, types, settings.llama_cpp, trusts_code)
        smallest = min(files, key=lambda file: file.stat().st_size)
        tokenizer = merged.trained.tokenizer
        text = make_modelfile([f"FROM ./{smallest.name}"], tokenizer, template_arguments, end_marks(tokenizer))
        write_atomically(out / MODELFILE, text)
    written = ", ".join(f"{file.name} ({show_bytes(file.stat().st_size)})" for file in files)
    folder = shlex.quote(str(out))
    log.info(
        f"GGUF: {written}\n  llama-server --model {shlex.quote(str(smallest))}\n"
        f"  cd {folder} && ollama create NAME --file {MODELFILE} && ollama run NAME"
    )
    return are_new


def _write_adapter_gguf(
    settings: MergeSettings, template_arguments: Mapping[str, Any], trained: AssembledModel
) -> None:
    """Write the adapter alone as GGUF files, with a Modelfile that puts it on its base."""
    from qlora_fsdp.inference.gguf_files import MODEL_CONVERTER, find_converter, write_gguf_adapter
    from qlora_fsdp.inference.merge_files import merging_to
    from qlora_fsdp.inference.modelfile import end_marks, make_modelfile

    assert settings.adapter is not None and settings.out is not None
    out = Path(settings.out).expanduser()
    with merging_to(out):
        files = write_gguf_adapter(
            trained, Path(settings.adapter).expanduser(), out, settings.gguf_types, settings.llama_cpp
        )
        tokenizer = trained.tokenizer
        lines = [f"# {BASE_FILE} is a GGUF file of the base model", f"FROM ./{BASE_FILE}", f"ADAPTER ./{files[0].name}"]
        write_atomically(out / MODELFILE, make_modelfile(lines, tokenizer, template_arguments, end_marks(tokenizer)))
    folder = shlex.quote(str(out))
    base = shlex.quote(str(out / BASE_FILE))
    converter = shlex.quote(str(find_converter(MODEL_CONVERTER, settings.llama_cpp) or MODEL_CONVERTER))
    log.info(
        f"GGUF: {', '.join(file.name for file in files)} in {out}, the adapter alone, for a GGUF file of its base:\n"
        f"  python {converter} {shlex.quote(str(trained.files.folder))} --outfile {base}\n"
        f"  llama-server --model {base} --lora {shlex.quote(str(files[0]))}\n"
        f"  cd {folder} && ollama create NAME --file {MODELFILE} && ollama run NAME"
    )


def _report(settings: MergeSettings, config: Config, merged: Merge, processes: Processes) -> None:
    """Compare what was written with base and adapter; say it, and write it into the folder of the result."""
    from qlora_fsdp.inference.gguf_files import gguf_name
    from qlora_fsdp.inference.merge_files import merging_to
    from qlora_fsdp.inference.merge_report import advise, describe_report
    from qlora_fsdp.inference.merged_card import make_merged_card
    from qlora_fsdp.model.adapters.model_card import auto_class_of

    found: MergeReport | str
    try:
        found = _compare(settings, config, merged, processes)
    except Exception as error:
        reason = _explain_failure(error)
        if reason is None:
            raise
        log.warning(f"Warning: the merge is done, but there is no report: {reason}")
        found = FAILED
    if isinstance(found, str) and (merged.out / REPORT_FILE).is_file():
        log.info(f"{CARD_FILE} and {REPORT_FILE} in {merged.out} stay as an earlier comparison wrote them.")
        return
    if not isinstance(found, str):
        log.info(describe_report(found))
        corrects_rounding = read_corrected_format(settings.adapter) is not None
        trained_format = config.quant.base_format
        for name, figures in found.written.items():
            warning = advise(name, figures, settings.base, settings.quantize, trained_format, corrects_rounding)
            if warning is not None:
                log.warning(f"Warning: {warning}")
    elif settings.report and found != FAILED:
        log.info(f"Note: no report of what the result keeps: {found}")
    base = config.model.path or config.model.name
    onto = "the base's own weights"
    if settings.base == "dequantized":
        onto = f"the base's weights in {config.quant.base_format}, on which the adapter was trained"
    format = "in the precision of the base's files" if settings.quantize is None else f"in {settings.quantize}"
    auto_class = auto_class_of(merged.meta.config) if config.task.is_causal else None
    about = {"base": settings.base, "quantize": settings.quantize}
    with merging_to(merged.out):
        if not isinstance(found, str):
            write_json(merged.out / REPORT_FILE, about | found.as_json())
        files = [gguf_name("model", name) for name in settings.gguf_types]
        has_bitsandbytes = settings.quantize in ("nf4", "fp4")
        card = make_merged_card(base, format, onto, auto_class, found, has_bitsandbytes, files)
        write_atomically(merged.out / CARD_FILE, card)
    if not isinstance(found, str):
        print_result(json.dumps(about | found.as_json()))


def _explain_failure(error: Exception) -> str | None:
    """Why a finished merge could not be compared, by an error of the comparison; None for a bug."""
    from qlora_fsdp.runtime.hardware import is_shortage, quote_shortage

    if isinstance(error, Interrupted):
        return None
    if isinstance(error, UserError):
        return str(error)
    if is_shortage(error):
        return f"{quote_shortage(error)}."
    return None


def _compare(settings: MergeSettings, config: Config, merged: Merge, processes: Processes) -> MergeReport | str:
    """The report of a merge, or why there is none."""
    from qlora_fsdp.inference.gguf_files import gguf_name
    from qlora_fsdp.inference.merge_report import (
        find_kept_rows,
        find_shortage,
        gguf_bytes,
        load_stock,
        make_report,
        read_rows_of_file,
    )
    from qlora_fsdp.inference.trained import load_trained

    assert settings.adapter is not None
    if not settings.report:
        return "report=false."
    if not config.task.is_causal:
        return "the model writes no text; qlora-fsdp evaluate has its figures."
    if settings.report_data is not None:
        spec = DataSpec.of(
            config.with_values({"data.path": settings.report_data, "data.mix": {}, "data.max_rows": None})
        )
        rows, what = read_rows_of_file(settings.report_data, settings.report_rows, spec, merged.trained, processes)
    else:
        try:
            rows, what = find_kept_rows(settings.adapter, merged.trained.model.vocab_size)
        except DataError as error:
            return f"{error} report_data=FILE names rows."
    format = merged.format
    decompresses = format is not None and format.decompresses
    shortage = find_shortage(merged.trained, merged.out, config.quant, processes.device, decompresses)
    if shortage is not None:
        return f"{shortage}."

    def load_as_trained() -> AssembledModel:
        return load_trained(config, settings, processes, generates=True)

    def load_merged(dtype: torch.dtype, device: torch.device) -> nn.Module:
        own = dtype if format is None or format.computes_in is None else format.computes_in
        return load_stock(merged.out, own, device, config.model.trust_remote_code)

    def load_gguf(file: Path) -> LoadForm:
        return lambda dtype, device: load_stock(merged.out, dtype, device, False, gguf_file=file.name)

    forms: dict[str, LoadForm] = {"merged": load_merged}
    host_bytes: dict[str, int] = {}
    for name in settings.gguf_types:
        file = merged.out / gguf_name("model", name)
        forms[file.name] = load_gguf(file)
        host_bytes[file.name] = gguf_bytes(merged.trained, processes.device)
    chosen = replace(rows, rows=rows.rows[: settings.report_rows])
    return make_report(load_as_trained, chosen, what, forms, processes.device, host_bytes)


def _group_size(settings: MergeSettings, quant: QuantConfig) -> int | None:
    """The groups of int4: as typed, or as the base was quantized in training; None for the format's own."""
    if settings.group_size is None and settings.quantize == quant.base_format == "int4":
        return quant.group_size
    return settings.group_size


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


def _describe_end(
    out: Path, was_there: bool, data: DataSpec, trusts_code: bool, trained_on: DataFormat | None, quantize: str | None
) -> str:
    """Describe the result, and what to type next with a model that writes text.

    The model's folder does not say how prompts were written in training, as the adapter's does.
    """
    from qlora_fsdp.inference.merge_formats import KINDS, PACKAGE_NAME

    is_for_servers = quantize in KINDS  # which they load, whatever else does
    files = list(out.glob("*.safetensors"))
    size = show_bytes(sum(file.stat().st_size for file in files))
    what = f"{plural(len(files), 'file')} of weights, {size}"
    if was_there:
        return f"{out} already holds this very merge ({what}). To merge once more, remove it or set another out."
    merged = f"Merged: {out} ({what}). It is a model as any other"
    if is_for_servers:
        merged = f"Merged: {out} ({what}). vLLM loads it, and so does transformers with the package {PACKAGE_NAME}"
    if not data.task.is_causal:
        return f"{merged}."
    given = f"model.path={shlex.quote(str(out))}{trust(trusts_code)}"
    serve = f"vllm serve {shlex.quote(str(out))}"
    if trusts_code:
        serve += " --trust-remote-code"
    if trained_on not in (None, DataFormat.messages):
        note = f"the adapter was trained on {trained_on.value} rows; prompts are to be written as these have them"
        command = serve if is_for_servers else f'qlora-fsdp generate {given} raw=true prompt="..."'
        return f"{merged}:\n  {command}\nNote: {note}."
    lines = [f"{merged}:", f"  {serve if is_for_servers else ask(given, out)}"]
    if data.settings.system_prompt:
        note = "conversations began with a system prompt in training, which the model does not have by itself"
        setting = "requests are to begin with it" if is_for_servers else "data.system_prompt sets it"
        lines.append(f"Note: {note}; {setting}: {data.settings.system_prompt}")
    if data.settings.template_arguments:
        arguments = show("data.template_arguments", data.settings.template_arguments)
        lines.append(
            f"Note: the chat template was given arguments in training, which the model does not have by itself: "
            f"{arguments}, or a server's chat_template_kwargs"
        )
    return "\n".join(lines)


def _check(
    settings: MergeSettings,
    data: DataSpec,
    quant: QuantConfig,
    weights: Weights,
    num_ranks: int,
    corrected_format: str | None,
) -> None:
    from qlora_fsdp.inference.gguf_files import gguf_problems

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
    of_model = {name: getattr(settings, name) for name in ("base", "quantize", "group_size", "report_data")}
    for name, value in of_model.items() if settings.write == "adapter" else ():
        if value != getattr(default, name):
            reason = "is about a merged model, and write=adapter makes none."
            problems.append(Problem(f"{name}={value}", reason, f"Leave {name} out, or set write=model."))
    if settings.gguf_types and settings.quantize is not None:
        reason = "is for safetensors, and llama.cpp's converter reads weights that are not quantized."
        problems.append(Problem(f"quantize={settings.quantize}", reason, "Leave quantize or gguf out."))
    problems += gguf_problems(settings.gguf_types, settings.write == "adapter", settings.llama_cpp)
    if settings.gguf_types and not data.task.is_causal:
        reason = "is for models that write text, and this is a classifier."
        problems.append(Problem(f"gguf={settings.gguf}", reason, "Leave gguf out."))
    problems += _format_problems(settings)
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
    if corrected_format is not None and (settings.base == "full" or settings.write == "adapter"):
        what = "write=adapter" if settings.write == "adapter" else "base=full"
        reason = f"is not for this adapter: it corrects what {corrected_format} rounds away from the base"
        reason += " (lora.init_lora_weights=loftq), and the base's own weights have nothing to correct."
        problems.append(Problem(what, reason, "Set base=dequantized, and leave write out."))
    if settings.base == "dequantized" and quant.base_format is None:
        problems.append(Problem("base=dequantized", "needs a quantized base.", "Set base=full."))
    if weights is Weights.random:
        fix = "Set model.weights=checkpoint and model.path to the model, if that is what the adapter was trained on."
        problems.append(Problem(show("model.weights", weights), "has no files to merge into.", fix))
    if num_ranks > 1:
        problems.append(Problem("--num_processes", "must be 1: a merge reads and writes files.", "Start one process."))
    refuse(problems)


def _format_problems(settings: MergeSettings) -> list[Problem]:
    """What is wrong with the format that the settings name."""
    from qlora_fsdp.inference.merge_formats import FORMATS, KINDS, PACKAGE_NAME, find_package_problem

    named = f"quantize={settings.quantize}"
    problems = []
    package_problem = find_package_problem() if settings.quantize in KINDS else None
    if settings.quantize is not None and settings.quantize not in FORMATS:
        problems.append(Problem(named, f"is none of {', '.join(FORMATS)}.", "Set one of them."))
    elif package_problem is not None:
        problems.append(Problem(named, package_problem, f"Run pip install 'qlora-fsdp[{PACKAGE_NAME}]'."))
    if settings.group_size is not None and settings.quantize != "int4":
        reason = "is for quantize=int4; other formats have groups of their own."
        problems.append(Problem(f"group_size={settings.group_size}", reason, "Leave group_size out."))
    elif settings.group_size is not None and settings.group_size not in GROUP_SIZES:
        reason = f"is none of {', '.join(map(str, GROUP_SIZES))}, for which servers have kernels."
        problems.append(Problem(f"group_size={settings.group_size}", reason, "Set one of them."))
    return problems


def _are_pairs(rows: str, data: DataSpec) -> bool:
    """Whether the rows are pairs of answers, and no texts."""
    from qlora_fsdp.data.read import find_first

    data = replace(data, settings=replace(data.settings, path=rows, mix={}))
    as_texts = replace(data, task=TaskSpec(TaskConfig(TaskName.causal_lm)))
    as_pairs = replace(data, task=TaskSpec(TaskConfig(TaskName.preference)))
    return find_first(as_texts) is None and find_first(as_pairs) is not None


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    return run_command(argv, MergeSettings, USAGE, merge, optional=["data.path", "reward.functions"])


if __name__ == "__main__":
    end_process(main())
