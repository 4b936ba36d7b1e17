"""`qlora-fsdp preflight`: does a run fit, and how long will it take? Needs no GPU and no weights.

The command line is that of the run, and besides

  hardware=2x24gib         the GPUs: COUNTxGIB or COUNTxNAME, such as 8xh100 (default: those of this host)
  training.max_length=max  asks for the longest rows that fit

    qlora-fsdp preflight model=llama3-70b hardware=2x24gib training.max_length=2048

A preset needs no download. Of another model on the hub, config.json is downloaded. Whether its rows can be packed is
tried with a small model, which takes torch; mistakes in the settings are told before torch is imported.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qlora_fsdp.common import contained
from qlora_fsdp.common.errors import CheckpointError, ConfigError, Problem, UserError, print_error, refuse
from qlora_fsdp.common.files import write_json
from qlora_fsdp.common.hub import fetch_config_json
from qlora_fsdp.common.startup import end_with_the_reader, quick_imports
from qlora_fsdp.common.terminal import wrap_words
from qlora_fsdp.common.text import plural, show_duration, show_size
from qlora_fsdp.config.checks.check_data import check_mix_values
from qlora_fsdp.config.checks.check_model import is_local_path
from qlora_fsdp.config.checks.check_settings import Needs, check_settings, check_world
from qlora_fsdp.config.data_sets import all_paths, match, mixed_sets, settings_for
from qlora_fsdp.config.model_config import describes_itself, read_config_json
from qlora_fsdp.config.outlook import Outlook
from qlora_fsdp.config.reading.commands import sweep_problems
from qlora_fsdp.config.reading.compose import load_config
from qlora_fsdp.config.schema import SHORTEST, Config, DataConfig, ModelConfig, TrainingConfig
from qlora_fsdp.config.settings import problem_about
from qlora_fsdp.config.world import AUTO, World, describe_slices, round_default
from qlora_fsdp.memory.answer_time import plan_answers
from qlora_fsdp.memory.gpus import Hardware, parse_hardware, visible_hardware
from qlora_fsdp.memory.plan import GIB
from qlora_fsdp.memory.search import MARGIN, Change, Choice, Room, cheapest_changes, choose, use_spare
from qlora_fsdp.memory.show import (
    as_json,
    changes_table,
    describe_choice,
    describe_longest,
    host_line,
    loading_line,
    read_bytes,
    remarks,
    speed_text,
    table,
)
from qlora_fsdp.memory.speed import load_seconds, planned_tokens_per_second
from qlora_fsdp.memory.traced import TracedModel
from qlora_fsdp.memory.workload import Workload, check_graph

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DOES_NOT_FIT = 3  # exit code
LONGEST = "training.max_length=max"  # what is typed to ask for the longest rows
# A run also needs data, a tokenizer and a folder to write to, which may be on another machine. The model may be named
# by its shape alone, and the end of the run matters only for its duration.
NEEDS = Needs(plans_only=True, optional=("training.max_steps",))
USAGE = "qlora-fsdp preflight [hardware=COUNTxGIB|COUNTxNAME] [group=option ...] [setting=value ...]"
BYTES_A_TOKEN = 4.0  # of text in a file of rows, as an estimate
EXAMPLE = 1e8  # tokens of a run about whose data nothing is known
EXAMPLE_SOURCE = "an example: "  # where a number of tokens comes from then begins with this


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan and writes preflight.json; returns 0 if the run fits, 3 if not, and 2 after a `UserError`."""
    try:
        return preflight(sys.argv[1:] if argv is None else argv, Path.cwd() / "preflight.json")
    except UserError as error:
        print_error(error)
        return error.exit_code


def preflight(argv: Sequence[str], file: Path) -> int:
    """Does what `main` says, with the JSON in `file`.

    Raises:
        UserError: settings can't be used, the hardware is unknown, or the model can't be found.
    """
    if "--help" in argv or "-h" in argv:
        print(f"{__doc__.strip()}\n\nusage: {USAGE}")
        return 0
    refuse(sweep_problems(argv))
    hardware, overrides = _split(argv)
    asks_for_longest = LONGEST in overrides
    overrides = [text for text in overrides if text != LONGEST]
    config = load_config(overrides, partial(check_settings, needs=NEEDS))
    _check(config, hardware)
    config, rounded = round_default(config, hardware.count)
    work, positions, padded = _trace(config, hardware)
    target = GIB * (config.memory.target_gib or hardware.gpu.gib * (1 - MARGIN))
    if asks_for_longest:
        lines, figures = describe_longest(work, hardware, target, _name(config.model), positions)
        lines += padded
        fits = any(row["gpus"] == hardware.count for row in figures["longest"])
    else:
        room = Room(target, hardware.gpu)
        choice = choose(work, room)
        planned = choice.plan.work
        check_graph(
            planned.modules,
            planned.config.fsdp.cpu_offload,
            choice.plan.policies,
            has_dropout=config.lora.lora_dropout > 0,
            is_cuda=True,
        )
        lines, figures = _describe(choice, hardware, room)
        notes = [*work.model.notes(work.modules), *([rounded] if rounded else [])]
        notes += _doubts(planned, figures["num_tokens"], figures["num_tokens_from"])
        lines += [*padded, *(wrap_words(f"Note: {note}", sys.stdout) for note in notes)]
        fits = choice.fits
        if fits:
            typed = shlex.join(overrides)
            lines += [f"Next, see what is trained on: qlora-fsdp preview {typed}", f"Then: qlora-fsdp train {typed}"]
        else:
            changes = cheapest_changes(work, room)
            lines += _describe_changes(choice, changes, target)
            figures["changes"] = [
                {"change": change.text, "needed_gib": change.plan.needed / GIB, "tokens_per_second": change.speed}
                for change in changes
            ]
    print("\n".join(lines))
    _write(file, figures)
    return 0 if fits else DOES_NOT_FIT


def _trace(config: Config, hardware: Hardware) -> tuple[Workload, int | None, list[str]]:
    """The run to plan, how many positions its model knows, and a note if its rows can't be packed. Imports torch."""
    size, values = config.training.micro_batch_size, _read_config(config.model)
    with quick_imports():
        contained.start(makes_configs=True)
        from qlora_fsdp.model.find import make_config
        from qlora_fsdp.model.positions import scale_rope
        from qlora_fsdp.tracing.model_tracer import trace_config

    model = make_config(values, _name(config.model))
    text = model.get_text_config()
    scale_rope(text, config.model.rope_scaling)
    config, padded = _settle_packing(config, model)
    traced = trace_config(model, config)
    work = Workload(
        traced,
        config,
        hardware.count,
        hardware.local_count,
        1 if size == AUTO else size,
        teacher_model=_trace_teacher(config),
    )
    return work, getattr(text, "max_position_embeddings", None), padded


def _trace_teacher(config: Config) -> TracedModel | None:
    """A teacher that is a model of its own, of which its config.json alone is read; None without one."""
    path = config.distill.teacher_model
    if path is None:
        return None
    from qlora_fsdp.model.find import make_config
    from qlora_fsdp.tracing.model_tracer import trace_config

    named = replace(config.model, name="custom", path=path, revision=None, config={}, rope_scaling={})
    try:
        model = make_config(_read_config(named), path)
        return trace_config(model, config.with_values({"model.path": path}), is_trained=False)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace("model.path", "distill.teacher_model")) from error


def _describe_changes(choice: Choice, changes: Sequence[Change], target: float) -> list[str]:
    """The lines about a run that does not fit: by how much, and what would make it fit."""
    plan = choice.plan
    missing = (plan.needed - target) / GIB
    excess = (plan.weight_bytes - target) / GIB
    alone = f" A rank's weights alone take {excess:.2f} GiB too much." if excess > 0 else ""
    return [
        f"It is {missing:.2f} GiB too much a GPU.{alone} The cheapest changes that make it fit:",
        changes_table(changes) or "  none found",
    ]


def _write(file: Path, figures: Mapping[str, Any]) -> None:
    try:
        write_json(file, figures)
    except OSError as error:
        problem = Problem(str(file), f"can't be written: {error.strerror}.", "Start it in another folder.")
        raise ConfigError([problem]) from error


def _read_config(model: ModelConfig) -> Mapping[str, Any]:
    """The transformers config of the model. Only what the settings do not describe is looked for.

    Raises:
        UserError: there is no such model, its config.json can't be had or is damaged, or it is another model than the
            preset.
    """
    if model.path is not None and is_local_path(model.path):
        file = Path(model.path).expanduser() / "config.json"
        if not file.is_file():
            raise CheckpointError(f"model.path={model.path} has no config.json. Set model.path to a folder with one.")
        return read_config_json(file, model)
    if describes_itself(model):
        return model.config
    if model.path is None:
        fix = "Set model to a preset (docs/models.md), or model.path to a folder or a hub name."
        raise ConfigError([problem_about("model.path", None, "names no model.", fix)])
    return read_config_json(fetch_config_json(model.path, model.revision), model)


def _settle_packing(config: Config, model: PretrainedConfig) -> tuple[Config, list[str]]:
    """Decides `training.packing=auto` as the run will, with the libraries of this host, and tells why rows are padded.

    Raises:
        ConfigError: the settings ask for packing, and the model's rows can't be packed.
    """
    if config.is_padded:
        return config, []
    from qlora_fsdp.model.trials.packing import TrialSpec, decide_packing, planned_dtype, why_not_packed

    spec = TrialSpec(
        task=config.task,
        max_length=config.training.max_length,
        slices=config.distributed.num_slices > 1,
        trust_remote_code=config.model.trust_remote_code,
    )
    wanted = config.model.attn_implementation.value
    reason = why_not_packed(model, spec, wanted, planned_dtype(config.training.precision))
    packs_rows, notes = decide_packing(config.training.packing, model, config.task, reason)
    return config.with_values({"training.packing": packs_rows}), [f"Note: {note}" for note in notes]


def _split(argv: Sequence[str]) -> tuple[Hardware, list[str]]:
    named = [text for text in argv if text.startswith("hardware=")]
    overrides = [text for text in argv if not text.startswith("hardware=")]
    if len(named) > 1:
        raise ConfigError([Problem("hardware=COUNTxGIB", f"is given {len(named)} times.", "Give it once.")])
    hardware = parse_hardware(named[0].partition("=")[2]) if named else visible_hardware()
    if hardware is None:
        reason = "is missing, and nvidia-smi finds no GPU here."
        raise ConfigError(
            [Problem("hardware=", reason, "Set hardware=1x24gib, 8xh100 or the like: COUNTxGIB or COUNTxNAME.")]
        )
    return hardware, overrides


def _check(config: Config, hardware: Hardware) -> None:
    """Refuse settings that a plan can't be made of."""
    has_fp8 = hardware.gpu.fp8_tflops > 0
    world = World(hardware.count, 0, hardware.local_count, 0, device_type="cuda", has_fp8=has_fp8)
    problems = [*check_settings(config, NEEDS), *check_mix_values(config.data), *check_world(config, world)]
    if config.memory.target_gib is not None and config.memory.target_gib > hardware.gpu.gib:
        reason = f"is more than a GPU of hardware= has: {hardware.gpu.gib:g} GiB."
        problems.append(Problem(f"memory.target_gib={config.memory.target_gib:g}", reason, "Set it to null, or lower."))
    refuse(problems)


def _describe(choice: Choice, hardware: Hardware, room: Room) -> tuple[list[str], dict[str, Any]]:
    """Returns the lines to print, and what preflight.json holds."""
    gpu = hardware.gpu
    target = room.target
    spending = use_spare(choice, target)
    plan = spending.plan
    work, config = plan.work, plan.work.config
    speed = planned_tokens_per_second(plan, gpu)
    tokens_a_step = work.num_micro_batches * work.num_tokens * work.num_ranks
    num_tokens, source = expect_tokens(config.data, config.training, tokens_a_step)
    of_data = num_tokens / speed / 3600
    answers = plan_answers(plan, target, gpu)
    slices = describe_slices(work.batch.sequence_length, work.batch.num_slices)
    shown = f"{num_tokens / 1e6:,.1f} M" if num_tokens >= 1e6 else f"{num_tokens:,.0f}"
    hours: float | None = of_data
    lasts = f"; {_duration(of_data)} for {shown} tokens ({source})"
    if answers is not None:  # of which no file says how many there will be
        hours = answers.hours
        lasts = f"; {answers.describe_time()}"
    verdict = "Fits" if choice.fits else "Does not fit"
    model = f"{_name(config.model)} ({show_size(work.parts.num_parameters)} parameters)"
    needed, used = (f"{each.needed / GIB:.2f}" for each in (choice.plan, plan))
    needed = f"{needed} GiB a GPU" + (f" ({used} with what it uses to be faster)" if used != needed else "")
    lines = [
        f"{verdict}: {model} on {hardware.count} x {gpu.name} needs {needed}, and {target / GIB:.2f} GiB of "
        f"{gpu.gib:g} can be had",
        *([f"The GPUs: {hardware.note}"] if hardware.note else []),
        f"{plural(work.num_shards, 'shard')}, micro-batch {work.micro_batch_size} x {work.batch.sequence_length} "
        f"tokens{slices}, {work.num_micro_batches} a step; {describe_choice(plan)}",
        "",
        table(plan),
        "",
        host_line(plan),
        loading_line(plan),
        *([] if answers is None else [answers.slots.describe()]),
        f"{speed_text(plan, gpu)}{lasts}",
        "The speed is predicted from the GPU's datasheet, by what H200s reached of theirs (docs/plan-validation.md)",
        *remarks(spending, room),
    ]
    figures = {
        "fits": choice.fits,
        "needed_gib": round(choice.plan.needed / GIB, 3),
        "hardware": {"gpu": gpu.name, "count": hardware.count, "gib": gpu.gib, "target_gib": target / GIB},
        "plan": as_json(plan),
        "host_gib": plan.host_needed / GIB,
        "pinned_gib": plan.pinned * work.local_num_ranks / GIB,
        "read_gib": read_bytes(work) / GIB,
        "load_seconds": load_seconds(plan),
        "tokens_per_second": speed,
        "num_tokens": num_tokens,
        "num_tokens_from": source,
        "hours": hours,
        **({} if answers is None else answers.figures()),
    }
    return lines, figures


def _doubts(work: Workload, num_tokens: float, source: str) -> list[str]:
    """What is to be doubted about the run: few steps, as far as its data is known, and an unusual learning rate."""
    config = work.config
    outlook = Outlook.of(config, work.num_ranks)
    num_steps, num_sequences = config.training.max_steps, None
    if num_steps is None and not source.startswith(EXAMPLE_SOURCE) and not config.is_padded:
        length = work.batch.sequence_length
        num_sequences = math.ceil(num_tokens / config.training.num_epochs / length)
        num_steps = math.ceil(num_tokens / length / (config.training.global_batch_size or 1))
    few = None if num_steps is None else outlook.few_steps(num_steps, num_sequences)
    if few is not None and num_sequences is not None:
        few += " These numbers follow from the bytes of the data: preview counts its tokens, and may advise others."
    return [doubt for doubt in (few, outlook.unusual_rate()) if doubt is not None]


def _duration(hours: float) -> str:
    if hours >= 10:
        return f"{hours:,.0f} hours"
    if hours >= 1:
        return f"{hours:.2g} hours"
    return show_duration(3600 * hours)


def _name(model: ModelConfig) -> str:
    if model.name != "custom":
        return model.name
    if model.path is not None:
        return model.path
    return f"the {model.config['model_type']} of model.config"


def expect_tokens(data: DataConfig, training: TrainingConfig, tokens_a_step: int) -> tuple[float, str]:
    """Returns the tokens of the run, and where the number comes from.

    Args:
        data: the files, and what is left out of them.
        training: how often they are seen.
        tokens_a_step: what a step of all ranks has room for.
    """
    if training.max_steps is not None:
        return training.max_steps * tokens_a_step, f"training.max_steps={training.max_steps}"
    if isinstance(data.mix_until, int):
        return training.num_epochs * data.mix_until, f"data.mix_until={data.mix_until}"
    names = all_paths(data)
    missing = [name for name in names if not match(name)]
    if missing and data.is_default:
        return (
            EXAMPLE,
            f"{EXAMPLE_SOURCE}the run would train on {missing[0]}, the default; data.path= names your own data",
        )
    if missing:
        return EXAMPLE, f"{EXAMPLE_SOURCE}{', '.join(missing)} is not here"
    if not names:
        return EXAMPLE, f"{EXAMPLE_SOURCE}set data.path or training.max_steps for your own"
    num_bytes = _bytes_of_an_epoch(data)
    fewer = " and ".join(_what_takes_a_part(data))
    source = f"{num_bytes / 1e6:,.1f} MB of data, 4 bytes a token{f'; less by {fewer}' if fewer else ''}"
    return training.num_epochs * (1 - data.eval_fraction) * num_bytes / BYTES_A_TOKEN, source


def _bytes_of_an_epoch(data: DataConfig) -> float:
    """Bytes of the files, those of a mix as often as their rows are repeated, as if all rows had one length."""
    if not data.mix:
        return sum(map(_num_bytes, all_paths(data)))
    weights = {name: own.weight for name, own in mixed_sets(data).items()}
    of_all = min if data.mix_until == SHORTEST else max
    return sum(weights.values()) * of_all(_num_bytes(name) / weight for name, weight in weights.items())


def _what_takes_a_part(data: DataConfig) -> list[str]:
    """The settings that leave out some rows of the files."""
    sets = [settings_for(name, data) for name in data.mix] or [data]
    has_number, has_slice = any(own.max_rows is not None for own in sets), any("[" in own.split for own in sets)
    return [*(["data.max_rows"] if has_number else []), *(["data.split"] if has_slice else [])]


def _num_bytes(name: str) -> int:
    paths = match(name)
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    return sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    end_with_the_reader()
    sys.exit(main())
